"""Fault 8: state that a block changes in forward, or that is changed for it between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS, Case, Plain, Stack
from runtime.rig import Attach, assert_bit_equal, no_warnings
from torch import nn
from torch.nn import functional

from hilore_plan.runtime.attributes import plain_attributes
from hilore_plan.runtime.block import HiloreWarning


def case_of(block: Callable[[], nn.Module], depth: int = 2) -> Case:
    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Stack(block, depth).to(dtype).train()

    return Case(block.__name__, build)


class Scaled(Plain):
    """Computes with plain attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.limits = (-9.0, 9.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.up(self.norm(x)) * self.scale).clamp(*self.limits)
        return x + self.down(torch.tanh(h))


class Counting(Scaled):
    """Counts its calls, and computes with the count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale += 0.25
        return super().forward(x)


def test_08_state_that_a_block_changes_in_forward_is_changed_once(attach: Attach) -> None:
    """A running mean and a count in buffers, with which the block computes: equal after each step, as gradients are."""
    case = MODELS["own_buffer"]
    model, reference = case.build(), case.build()
    attach(model)
    for step in range(3):
        inputs = case.make_inputs(2, 9 + step, seed=step)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))
        for layer, other in zip(model.layers, reference.layers, strict=True):
            assert int(layer.calls) == step + 1
            assert torch.equal(layer.running, other.running)


@pytest.mark.filterwarnings("ignore:hilore. block:hilore_plan.runtime.block.HiloreWarning")
def test_08_a_count_that_a_block_computes_with_is_not_frozen_at_what_it_was(attach: Attach) -> None:
    case = case_of(Counting)
    model, reference = case.build(), case.build()
    attach(model)
    train_alike(case, model, reference, steps=4)
    assert [layer.scale for layer in model.layers] == [layer.scale for layer in reference.layers]


class Late(Plain):
    """Counts its calls, and computes with the count from the sixth on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = functional.gelu(self.up(self.norm(x))) * (0.5 if self.calls > 5 else 1.0)
        return x + self.down(torch.tanh(h))


def train_alike(case: Case, model: nn.Module, reference: nn.Module, steps: int) -> None:
    for step in range(steps):
        inputs = case.make_inputs(2, 9, seed=step)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))


def test_08_a_count_that_matters_late_is_noticed_then(attach: Attach) -> None:
    """As long as the count changes nothing the plan is at work; what it rebuilds is compared with what it lets go."""
    case = case_of(Late)
    model, reference = case.build(), case.build()
    runtime = attach(model)
    with pytest.warns(HiloreWarning) as caught:
        train_alike(case, model, reference, steps=8)
    texts = sorted(str(warning.message) for warning in caught)
    assert ["attributes change" in text for text in texts].count(True) == 2
    assert ["stored from now on" in text for text in texts].count(True) == 2
    assert not runtime.report().fallbacks
    assert runtime.report().frames == 16


def test_08_a_function_that_calls_itself_can_be_an_attribute() -> None:
    def build(depth: int) -> Any:
        def again(number: int) -> int:
            return number if number > depth else again(number + 1)

        return again

    one, same, other = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    one.scale, same.scale, other.scale = build(3), build(3), build(4)
    assert plain_attributes(one) == plain_attributes(same)
    assert plain_attributes(one) != plain_attributes(other)


@pytest.mark.parametrize(("name", "value"), [("scale", 0.5), ("limits", (-0.01, 0.01))])
def test_08_an_attribute_that_is_set_between_steps_counts_from_then_on(
    name: str, value: object, attach: Attach
) -> None:
    """A schedule sets what a block computes with: a graph that was captured before has the old number in it."""
    case = case_of(Scaled)
    model, reference = case.build(), case.build()
    attach(model)
    for step in range(4):
        if step == 2:
            for layer in (*model.layers, *reference.layers):
                setattr(layer, name, value)
        inputs = case.make_inputs(2, 9, seed=step)
        with no_warnings():
            assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))


def test_08_blocks_that_differ_in_an_attribute_do_not_share_a_graph(attach: Attach) -> None:
    """The limits of the second block bind only later: at first both blocks save the same."""
    case = case_of(Scaled)
    models = case.build(), case.build()
    for model in models:
        model.layers[1].limits = (-0.2, 0.2)
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.01)
    attach(models[0])
    for step in range(3):
        if step == 2:
            for model in models:
                with torch.no_grad():
                    model.layers[1].up.weight.mul_(300.0)
        inputs = case.make_inputs(2, 9, seed=step)
        assert_bit_equal(case.gradients(models[0], inputs), case.gradients(models[1], inputs))
