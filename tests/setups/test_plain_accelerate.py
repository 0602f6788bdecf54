"""Loops under accelerate, whose wrappers may come before the plan or after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState, GradientAccumulationPlugin, PartialState
from accelerate.utils import DynamoBackend
from models import Case
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, no_warnings
from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.runtime.attach import Runtime, apply

pytestmark = pytest.mark.setups

Make = Callable[..., Accelerator]
Inputs = dict[str, torch.Tensor]


@pytest.fixture
def make_accelerator() -> Iterator[Make]:
    """Its settings are the process's, and the first one's: each test has its own."""

    def make(**settings: Any) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, **settings)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def train(
    make: Make, case: Case, model: nn.Module, settings: dict[str, Any], plan_it: Callable[[nn.Module], Runtime] | None
) -> tuple[dict[str, torch.Tensor], Runtime | None]:
    """Six micro-batches in three optimizer steps; the plan is attached by `plan_it` once all is prepared."""
    accelerator = make(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    prepared, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    runtime = plan_it(prepared) if plan_it else None
    for number in range(6):
        with accelerator.accumulate(prepared):
            with accelerator.autocast():
                loss = case.loss(prepared, case.make_inputs(2, 8 + number % 3, seed=number))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1e-2)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    bare = accelerator.unwrap_model(prepared)
    return {name: parameter.detach().clone() for name, parameter in bare.named_parameters()}, runtime


SETTINGS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"mixed_precision": "bf16"}}
CASES = {case.name: case for case in (PLAIN, LLAMA)}


@pytest.mark.parametrize("late", [False, True], ids=["before_prepare", "after_prepare"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_plan_changes_nothing(
    case: Case, settings: dict[str, Any], late: bool, make_accelerator: Make, attach: Attach
) -> None:
    def plan_it(model: nn.Module) -> Runtime:
        return attach.chosen(case, plans.seeded(5), model)

    model, reference = case.build(), case.build()
    runtime = None if late else plan_it(model)
    with no_warnings():
        got, found = train(make_accelerator, case, model, settings, plan_it if late else None)
        want, _ = train(make_accelerator, case, reference, settings, None)
    assert_bit_equal(got, want)
    runtime = runtime or found
    assert runtime is not None
    report = runtime.report()
    assert report.frames > 0
    assert report.passed_through == 0
    assert not report.fallbacks


def test_a_saved_state_goes_on_where_it_was(make_accelerator: Make, attach: Attach, tmp_path: Path) -> None:
    """Saving, loading into a model with a plan, and going on gives what a run without any plan gives."""
    ends = []
    for planned in (False, True):
        model = PLAIN.build()
        for part in range(2):
            accelerator = make_accelerator()
            model = PLAIN.build(seed=part)  # the second part starts from another model, until it has loaded the first's
            if planned:
                attach(model)
            prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            if part:
                accelerator.load_state(str(tmp_path / str(planned)))
            for seed in range(2):
                accelerator.backward(PLAIN.loss(prepared, PLAIN.make_inputs(2, 9, seed=2 * part + seed)))
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(str(tmp_path / str(planned)))
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_bit_equal(*ends)


class Doubles(ModelHook):
    """A hook of accelerate's kind, which puts a forward of its own in place of the module's."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


@pytest.mark.parametrize("late", [False, True], ids=["before_the_plan", "after_the_plan"])
@pytest.mark.parametrize("inside", [False, True], ids=["on_blocks", "inside_blocks"])
def test_hooks_of_accelerate_keep_their_effect(inside: bool, late: bool, attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    inputs = PLAIN.make_inputs(2, 9, seed=0)

    def put(model: nn.Module) -> None:
        for layer in model.layers:
            add_hook_to_module(layer.up if inside else layer, Doubles())
            add_hook_to_module(layer.norm, AlignDevicesHook(execution_device="cpu"))

    put(reference)
    if not late:
        put(model)
    runtime = attach(model)
    if late:
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(PLAIN.build(), inputs))
        put(model)
    for _ in range(2):
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))
    for layer in model.layers:
        remove_hook_from_module(layer.up if inside else layer)
    for _ in range(2):
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(PLAIN.build(), inputs))
    assert not runtime.report().fallbacks


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch 2.13 warns of what it imports
def test_a_model_that_accelerate_compiles_is_refused(make_accelerator: Make, attach: Attach) -> None:
    model = PLAIN.build()
    plan = plans.make_plan(model)
    prepared = make_accelerator(dynamo_backend=DynamoBackend.EAGER).prepare(model)
    with pytest.raises(RefusedError, match=r"is compiled by torch\.compile"):
        apply(prepared, plan)
    model = PLAIN.build()
    runtime = attach(model, plan)
    prepared = make_accelerator(dynamo_backend=DynamoBackend.EAGER).prepare(model)
    with pytest.raises(RefusedError, match=r"layers\.0 is compiled by torch\.compile"):
        PLAIN.loss(prepared, PLAIN.make_inputs(2, 9, seed=0))
    assert runtime.report().passed_through == 0
