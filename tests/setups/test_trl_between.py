"""What happens around the training steps: evaluation, generation, checkpoints, several trainers on one model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from runtime.rig import assert_bit_equal
from setups.trl_runs import (
    ACCUMULATION,
    BLOCKS,
    MARKS,
    STEPS,
    Make,
    Setup,
    assert_as_planned,
    assert_plans_are_exact,
    make_dpo,
    make_grpo,
    make_sft,
    parameters_of,
    train,
)

from hilore_plan.integrations.trl import Attachment

pytestmark = MARKS

TRAINERS: dict[str, Make] = {"grpo": make_grpo, "sft": make_sft, "dpo": make_dpo}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("adapter", [None, {"lora_dropout": 0.2}], ids=["full", "lora"])
@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_evaluation_between_steps_is_neither_planned_nor_counted(
    make: Make, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = assert_plans_are_exact(make, Setup(EVALUATED, adapter), tmp_path)
    assert run.runtime is not None
    assert run.runtime.report().passed_through >= BLOCKS * 2 * STEPS  # two batches to evaluate after each step


def test_generation_between_steps_is_neither_planned_nor_counted(tmp_path: Path) -> None:
    run = train(trainer := make_grpo(Setup(), tmp_path), plans.make_plan(trainer.model))
    assert_as_planned(run, STEPS * ACCUMULATION)
    assert run.runtime is not None
    assert run.runtime.report().passed_through > 0


@pytest.mark.parametrize("adapter", [None, {}], ids=["full", "lora"])
@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_training_goes_on_from_a_checkpoint(make: Make, adapter: dict[str, Any] | None, tmp_path: Path) -> None:
    setup = Setup(SAVED, adapter)
    trainer = make(setup, tmp_path)
    saved = train(trainer, plans.make_plan(trainer.model))
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tmp_path / "out" / "checkpoint-1", checkpoint)
    assert_bit_equal(train(make(setup, tmp_path)).parameters, saved.parameters)
    assert_plans_are_exact(make, setup, tmp_path, resume=str(checkpoint), steps=1)


def test_a_second_training_of_one_trainer_goes_on_under_the_plan(tmp_path: Path) -> None:
    def twice(planned: bool) -> Any:
        trainer = make_grpo(Setup(), tmp_path)
        attachment = Attachment(plans.make_plan(trainer.model))
        if planned:
            attachment.add(trainer)
        torch.manual_seed(1)
        trainer.train()
        trainer.train()
        attachment.undo()
        return trainer, attachment

    (plain, _), (trainer, attachment) = twice(False), twice(True)
    assert_bit_equal(parameters_of(trainer), parameters_of(plain))
    assert [report.frames for report in attachment.reports] == [2 * STEPS * ACCUMULATION * BLOCKS]


def test_sft_and_then_grpo_on_one_model_share_a_runtime(tmp_path: Path) -> None:
    from trl import GRPOTrainer, SFTTrainer

    def both(planned: bool) -> Any:
        first = make_sft(Setup(), tmp_path)
        attachment = Attachment(plans.make_plan(first.model))
        if planned:
            attachment.add(SFTTrainer)
            attachment.add(GRPOTrainer)
        try:
            torch.manual_seed(1)
            first.train()
            second = make_grpo(Setup(prepare=lambda _: first.model), tmp_path)
            torch.manual_seed(1)
            second.train()
        finally:
            attachment.undo()
        return second, attachment

    (plain, _), (trainer, attachment) = both(False), both(True)
    assert_bit_equal(parameters_of(trainer), parameters_of(plain))
    assert [report.frames for report in attachment.reports] == [2 * STEPS * ACCUMULATION * BLOCKS]
    assert "_compute_loss" not in vars(trainer)
    assert SFTTrainer.compute_loss.__module__ == "trl.trainer.sft_trainer"
    assert not hasattr(SFTTrainer.compute_loss, "__wrapped__")
