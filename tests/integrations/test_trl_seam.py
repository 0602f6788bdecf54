"""The seam in trainers, on stand-ins with the same methods; `test_launcher.py` runs the real one."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import FAMILIES
from plans import by_exposure, make_plan
from torch import nn

from hilore_plan.errors import PlanMismatchError, RefusedError
from hilore_plan.integrations.trl import attach_to
from hilore_plan.integrations.trl_trainers import TRAINERS, count_tokens, loss_method
from hilore_plan.runtime.block import HiloreWarning

CASE = FAMILIES["llama"]


class Trainer:
    """What the seam touches of a `GRPOTrainer`."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        self.model = model
        self.args = SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None, **arguments)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: getattr(model, "module", model))

    def _compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return CASE.loss(model, {"input_ids": ids})

    def step(self, seed: int = 0) -> dict[str, torch.Tensor]:
        ids = CASE.make_inputs(2, 12, seed)["input_ids"]
        self.model.zero_grad()
        self._compute_loss(self.model, {"prompt_ids": ids[:, :5], "completion_ids": ids[:, 5:]}).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


class OtherTrainer(Trainer):
    """What the seam touches of transformers' `Trainer`, whose loss may come with the model's outputs."""

    _compute_loss = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.state = SimpleNamespace(global_step=0)
        self.logged: list[dict[str, float]] = []

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, items: int = 1
    ) -> Any:
        loss = CASE.loss(model, inputs) * items
        return (loss, "outputs") if return_outputs else loss

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def step(self, seed: int = 0, return_outputs: bool = False) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        result = self.compute_loss(self.model, CASE.make_inputs(2, 12, seed), return_outputs, items=3)
        (result[0] if return_outputs else result).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", [Trainer, OtherTrainer])
@pytest.mark.parametrize("on_class", [False, True], ids=["instance", "class"])
def test_a_planned_trainer_gives_the_same_gradients_and_is_restored(on_class: bool, kind: type[Trainer]) -> None:
    expected = kind(CASE.build()).step()
    trainer = kind(CASE.build())
    before = dict(vars(kind)), dict(vars(trainer))
    plan = make_plan(trainer.model, tokens=(24, 100))
    attachment = attach_to(kind if on_class else trainer, plan)
    try:
        assert same(trainer.step(), expected)
        report = attachment.runtimes[0].report()
        assert report.frames == 3
        assert [use.frames for use in report.entries] == [3, 0]  # 2 rows of 12 tokens
    finally:
        attachment.undo()
    attachment.undo()
    assert (dict(vars(kind)), dict(vars(trainer))) == before
    assert "forward" not in vars(trainer.model.model.layers[0])
    assert same(trainer.step(), expected)


def test_the_plan_waits_for_training() -> None:
    trainer = Trainer(CASE.build())
    attachment = attach_to(trainer, make_plan(trainer.model))
    ids = CASE.make_inputs(1, 6, 0)["input_ids"]
    inputs = {"prompt_ids": ids[:, :2], "completion_ids": ids[:, 2:]}
    with torch.no_grad():
        trainer._compute_loss(trainer.model, inputs)
    trainer.model.eval()
    trainer._compute_loss(trainer.model, inputs)
    assert attachment.runtimes == []
    attachment.undo()


def test_the_model_is_taken_out_of_its_wrapper() -> None:
    trainer = Trainer(CASE.build())
    attachment = attach_to(trainer, make_plan(trainer.model))
    wrapped = nn.Module()
    wrapped.module = trainer.model
    assert attachment.runtime_of(trainer, wrapped) is attachment.runtime_of(trainer, trainer.model)
    attachment.undo()


def test_another_model_is_refused_with_what_differs() -> None:
    plan = make_plan(CASE.build())
    trainer = Trainer(FAMILIES["gpt2"].build())
    attachment = attach_to(trainer, plan)
    with pytest.raises(PlanMismatchError, match="LlamaForCausalLM"):
        trainer.step()
    attachment.undo()


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    trainer = Trainer(CASE.build())
    trainer.args.gradient_checkpointing = True
    trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": True}
    attachment = attach_to(trainer, make_plan(trainer.model))
    with pytest.raises(RefusedError, match="use_reentrant=True"):
        trainer.step()
    attachment.undo()


def test_a_class_without_the_method_is_refused() -> None:
    with pytest.raises(RefusedError, match="neither _compute_loss nor compute_loss"):
        attach_to(nn.Linear, make_plan(CASE.build()))


def test_tokens_are_counted_with_padding() -> None:
    assert count_tokens({"prompt_ids": torch.zeros(2, 5), "completion_ids": torch.zeros(2, 7)}) == 24
    assert count_tokens({"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2, 5)}) == 10
    assert count_tokens({"input_features": torch.zeros(2, 5)}) is None


def test_the_methods_are_those_of_the_real_trainers() -> None:
    for module, name in TRAINERS.items():
        trainer = getattr(import_module(module), name)
        assert loss_method(trainer) == ("_compute_loss" if name == "GRPOTrainer" else "compute_loss")


def test_where_no_exposure_is_known_a_micro_batch_counts_as_the_riskiest() -> None:
    expected = OtherTrainer(CASE.build()).step(return_outputs=True)
    trainer = OtherTrainer(CASE.build())
    compressed = [{"mlp.gate_proj": "compress:int8"}] * 3
    attachment = attach_to(
        trainer, by_exposure(make_plan(trainer.model), (1.0, 0.01, compressed), (None, 0.0, [{}] * 3))
    )
    with pytest.warns(HiloreWarning, match="OtherTrainer names no loss_type"):
        assert same(trainer.step(return_outputs=True), expected)
    assert same(trainer.step(return_outputs=True), expected)
    assert [use.frames for use in attachment.reports[0].entries] == [0, 6]
    attachment.undo()


def test_the_true_error_is_logged_once_a_step() -> None:
    trainer = OtherTrainer(CASE.build())
    compressed = [{"mlp.gate_proj": "compress:int8"}] * 3
    plan = by_exposure(make_plan(trainer.model), (None, 0.01, compressed))
    attachment = attach_to(trainer, plan, check_every=2)
    for step in (0, 0, 1, 2):
        trainer.state.global_step = step
        trainer.step(return_outputs=step == 2)
    errors = [values["hilore/true_error"] for values in trainer.logged]
    assert len(errors) == 2
    assert all(0 < error < 0.1 for error in errors)
    assert attachment.reports[0].expected_error == pytest.approx(0.01)
    attachment.undo()


def test_a_wrapper_that_somebody_has_wrapped_does_nothing_after_undo() -> None:
    trainer = OtherTrainer(CASE.build())
    attachment = attach_to(trainer, make_plan(trainer.model))
    planned = trainer.compute_loss
    trainer.compute_loss = partial(planned, items=2)  # type: ignore[method-assign]
    attachment.undo()
    trainer.compute_loss(trainer.model, CASE.make_inputs(2, 12, 0)).backward()
    assert attachment.runtimes == []


def test_a_model_that_is_gone_leaves_its_report_and_nothing_else() -> None:
    trainer = Trainer(CASE.build())
    weight = weakref.ref(trainer.model.model.layers[0].mlp.up_proj.weight)
    attachment = attach_to(Trainer, make_plan(trainer.model))
    trainer.step()
    assert [report.frames for report in attachment.reports] == [3]
    del trainer
    gc.collect()
    assert weight() is None
    assert attachment.runtimes == []
    assert [report.frames for report in attachment.reports] == [3]
    attachment.undo()


def test_a_model_that_goes_after_undo_is_reported_once() -> None:
    trainer = Trainer(CASE.build())
    attachment = attach_to(Trainer, make_plan(trainer.model))
    trainer.step()
    attachment.undo()
    del trainer
    gc.collect()
    assert [report.frames for report in attachment.reports] == [3]
