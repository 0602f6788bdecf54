"""Attach plans of any actions, watch what becomes of saved tensors, and count what is alive."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import plans
import pytest
import torch
from models import FAMILIES, MODELS, Case
from torch import nn

from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.frame import Handle
from hilore_plan.runtime.hooks import Packer
from hilore_plan.runtime.recipe import Recipe
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.plan import Plan

PLAIN = MODELS["plain"]
LLAMA = FAMILIES["llama"]
Gradients = dict[str, torch.Tensor]


class Shared:
    """What is worked out once for all tests: graphs, what plans make of them, and the plans, whose actions live on."""

    def __init__(self) -> None:
        self.variants = Variants()
        self.recipes: dict[Any, Recipe] = {}
        self.plans: list[Plan] = []
        self.chosen: dict[Any, Plan] = {}
        self.graphs: dict[Any, list[BlockGraph]] = {}


class Attach:
    """Attaches plans to models."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._runtimes: list[Runtime] = []

    def __call__(self, model: nn.Module, plan: Plan | None = None, **kwargs: Any) -> Runtime:
        """Attach a plan (none: everything is recomputed)."""
        plan = plan or plans.make_plan(model, blocks=kwargs.get("blocks"))
        runtime = apply(model, plan, **kwargs)
        runtime.variants = self._shared.variants
        runtime._recipes = self._shared.recipes  # by the identity of a plan's actions
        self._shared.plans.append(plan)
        self._runtimes.append(runtime)
        return runtime

    def chosen(self, case: Case, choice: plans.Choose, model: nn.Module, **kwargs: Any) -> Runtime:
        """Attach a plan that treats each unit as `choice` says."""
        key = (case.name, next(model.parameters()).dtype, choice, *kwargs.items())
        plan = self._shared.chosen.get(key)
        if plan is None:
            plan = self._shared.chosen[key] = plans.make_plan(model, self.actions(case, choice, model), **kwargs)
        return self(model, plan)

    def actions(self, case: Case, choice: plans.Choose, model: nn.Module) -> list[dict[str, plans.Action]]:
        """Actions per block for a model like `model`, which itself stays as it is."""
        return plans.choose(self.graphs(case, model), choice)

    def graphs(self, case: Case, model: nn.Module) -> list[BlockGraph]:
        """The graphs of a model's blocks, captured in a forward of a model like it."""
        dtype = next(model.parameters()).dtype
        key = (case.name, dtype)
        if key not in self._shared.graphs:
            other = case.build(dtype=dtype)
            runtime = self(other)
            warm_up(case, other)
            runtime.detach()
            self._shared.graphs[key] = plans.graphs_of(runtime)
        return self._shared.graphs[key]

    def detach_all(self) -> None:
        """Detach what a test has left attached."""
        for runtime in self._runtimes:
            runtime.detach()


class HandleLog:
    """Records the handles that pack hooks return, with a description of each saved tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: list[Handle] = []
        self.saved: list[tuple[Any, ...]] = []
        pack = Packer.pack

        def record(packer: Packer, tensor: torch.Tensor) -> Handle:
            handle = pack(packer, tensor)
            self.handles.append(handle)
            self.saved.append(describe(tensor))
            return handle

        monkeypatch.setattr(Packer, "pack", record)

    def clear(self) -> None:
        """Let go of everything recorded."""
        self.handles.clear()
        self.saved.clear()


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything that must be the same of a tensor that comes back, but its offset in a storage that may be smaller."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def warm_up(case: Case, model: nn.Module, length: int = 9) -> None:
    """One step, after which every block has had its trial and handles are what the plan says."""
    case.gradients(model, case.make_inputs(2, length, seed=5))
    model.zero_grad(set_to_none=True)


def assert_bit_equal(got: Gradients, want: Gradients) -> None:
    assert got.keys() == want.keys()
    wrong = [name for name in want if not torch.equal(got[name], want[name])]
    assert not wrong, f"gradients differ: {wrong[:5]}"


def assert_plan_is_exact(
    case: Case, runtime: Runtime, model: nn.Module, reference: nn.Module | None = None, steps: int = 2
) -> None:
    """Gradients of the planned model equal those of an unplanned one, for the trial frame and for later ones."""
    reference = reference or case.build(dtype=next(model.parameters()).dtype)
    for step in range(steps):
        inputs = case.make_inputs(2, 9 + step, seed=step)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))
    report = runtime.report()
    assert report.frames > 0 or report.fallbacks


def live_tensors() -> int:
    """Tensors that some Python object holds."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection: what only a collector could free stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
