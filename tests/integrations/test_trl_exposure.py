"""Exposures in the real `GRPOTrainer`: what is predicted before forward is what backward begins with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from torch import nn

from hilore_plan.exposure.losses import LOSS_TYPES
from hilore_plan.integrations import smollm2
from hilore_plan.integrations.families import build_family
from hilore_plan.integrations.trl import Attachment, attach_to
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.meter import LEAST, Meter
from hilore_plan.runtime.microbatch import Microbatch

# TRL 1.16 uses names that transformers 5.24 is about to change
pytestmark = pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")

STEPS, MICRO_BATCHES, BLOCKS = 2, 2, 3
Train = Callable[..., tuple[Any, Attachment]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.model_directory())


@pytest.fixture
def train(tokenizer: Any, tmp_path: Path) -> Train:
    """Trains a tiny model for two steps under a plan with two exposure buckets; the lower one is compressed."""

    def run(check_every: int = 0, known: bool = True, **settings: Any) -> tuple[Any, Attachment]:
        model = build_family("llama", dtype=torch.float32, attention="sdpa", seed=0, vocab_size=len(tokenizer)).train()
        model.save_pretrained(tmp_path / "model")  # where the trainer finds its reference model, if it wants one
        model.config._name_or_path = str(tmp_path / "model")
        trainer = _trainer(model, tokenizer, tmp_path, settings)
        attachment = attach_to(trainer, two_buckets(model), check_every)
        if known:
            runtime = attachment.runtime_of(trainer, trainer.model)
            runtime.meter = Meter(seen=LEAST, mean=1e6)
        try:
            trainer.train()
        finally:
            attachment.undo()
        return trainer, attachment

    return run


def _trainer(model: nn.Module, tokenizer: Any, folder: Path, settings: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, num_generations=4,
        gradient_accumulation_steps=MICRO_BATCHES, max_completion_length=6, learning_rate=1e-3, bf16=False,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
        logging_steps=1, **settings,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=config, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [len(text) % 7 / 7 for text in completions],
        train_dataset=Dataset.from_list([{"prompt": "Two and two " * (i % 3 + 1)} for i in range(16)]),
    )  # fmt: skip


def two_buckets(model: nn.Module) -> Any:
    """Everything compressed up to the mean exposure, everything recomputed above."""
    compressed = [{"mlp.gate_proj": "compress:int8", "mlp.up_proj": "compress:int8"}] * BLOCKS
    return plans.by_exposure(plans.make_plan(model), (1.0, 0.01, compressed), (None, 0.0, [{}] * BLOCKS))


class Log:
    """Pairs of exposures: as predicted, and as backward began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs: list[tuple[float, float]] = []
        settle = Microbatch._settle

        def record(micro_batch: Microbatch, exact: float) -> None:
            assert micro_batch.absolute is not None
            self.pairs.append((micro_batch.absolute, exact))
            settle(micro_batch, exact)

        monkeypatch.setattr(Microbatch, "_settle", record)


@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_on_policy_the_prediction_is_exact(train: Train, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    log = Log(monkeypatch)
    _, attachment = train(loss_type=loss)
    assert len(log.pairs) == STEPS * MICRO_BATCHES
    for predicted, exact in log.pairs:
        assert math.isclose(predicted, exact, rel_tol=1e-5)  # both in float32, from a few hundred terms
    assert any(exact > 0 for _, exact in log.pairs)
    (report,) = attachment.reports
    assert report.escalations == 0
    assert [use.frames for use in report.entries] == [STEPS * MICRO_BATCHES * BLOCKS, 0]
    assert 0 < report.expected_error <= 0.01


def test_off_policy_the_exact_exposure_is_seen_in_backward(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    train(num_iterations=2, beta=0.04, steps_per_generation=2)
    assert len(log.pairs) == STEPS * MICRO_BATCHES
    assert all(exact > 0 for _, exact in log.pairs)


def test_an_entropy_bonus_leaves_the_exposure_unknown(train: Train) -> None:
    with pytest.warns(HiloreWarning, match="such a micro-batch counts as the riskiest"):
        _, attachment = train(entropy_coef=0.01)
    (report,) = attachment.reports
    assert [use.frames for use in report.entries] == [0, STEPS * MICRO_BATCHES * BLOCKS]


def test_the_true_error_is_logged_and_the_training_is_the_same(train: Train) -> None:
    checked, _ = train(check_every=1)
    plain, _ = train()
    history = [entry["hilore/true_error"] for entry in checked.state.log_history if "hilore/true_error" in entry]
    assert len(history) == STEPS
    assert all(0 < error < 0.1 for error in history)
    for one, other in zip(checked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_left_on_the_trainer(train: Train) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HiloreWarning)
        trainer, _ = train()
    assert not {"_get_per_token_logps_and_entropies", "_compute_loss"} & vars(trainer).keys()
