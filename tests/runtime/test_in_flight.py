"""Frames in flight: several at once, in any order of backward, twice, of mixed lengths, and interrupted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import plans
import pytest
import torch
from models import MODELS, WIDTH
from runtime.rig import LLAMA, PLAIN, Attach, Gradients, assert_bit_equal, warm_up
from torch import nn

from hilore_plan.errors import RecoveryError
from hilore_plan.runtime.frame import live_frames

CHOICES = {"recompute": None, "store": plans.store, "cast": plans.cast, "mixed": plans.seeded(4)}
Use = Callable[[nn.Module], None]


@pytest.fixture(params=CHOICES)
def planned(request: pytest.FixtureRequest, attach: Attach) -> nn.Module:
    """A bf16 llama under a plan, past its trial."""
    model = LLAMA.build(dtype=torch.bfloat16)
    choice = CHOICES[request.param]
    attach(model) if choice is None else attach.chosen(LLAMA, choice, model)
    warm_up(LLAMA, model)
    return model


def gradients_after(use: Use, model: nn.Module) -> Gradients:
    model.zero_grad(set_to_none=True)
    use(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(use: Use, model: nn.Module) -> None:
    """`use` gives the same gradients with the plan as without."""
    reference = LLAMA.build(dtype=torch.bfloat16)
    assert_bit_equal(gradients_after(use, model), gradients_after(use, reference))
    assert live_frames() == 0


def losses(model: nn.Module, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [LLAMA.loss(model, LLAMA.make_inputs(*shape, seed=i)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_micro_batches_in_flight_of_mixed_lengths(planned: nn.Module, order: tuple[int, ...]) -> None:
    def use(model: nn.Module) -> None:
        waiting = losses(model, [(2, 9), (2, 14), (2, 9)])
        for index in order:
            waiting[index].backward()

    assert_same(use, planned)


def test_one_backward_through_two_forwards(planned: nn.Module) -> None:
    def use(model: nn.Module) -> None:
        first, second = losses(model, [(2, 9), (3, 6)])
        (first * second).backward()

    assert_same(use, planned)


def test_two_backwards_through_one_forward(planned: nn.Module) -> None:
    def use(model: nn.Module) -> None:
        (loss,) = losses(model, [(2, 9)])
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    assert_same(use, planned)


def test_backward_of_a_part_and_then_of_all(planned: nn.Module) -> None:
    def use(model: nn.Module) -> None:
        (loss,) = losses(model, [(2, 9)])
        weight = model.model.layers[1].mlp.up_proj.weight
        (partial,) = torch.autograd.grad(loss, weight, retain_graph=True)
        loss.backward()
        assert torch.equal(partial, weight.grad)

    assert_same(use, planned)


class AsksTwice(torch.autograd.Function):
    """Its backward gets at what it saved in two goes, and uses the one after the other is there."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = ctx.saved_tensors[0]
        other = ctx.saved_tensors[1]
        return grad * other, grad * one


class TwoBranches(nn.Module):
    """Two ways from the same argument, with nothing in common that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = torch.tanh(self.left(x)), torch.tanh(self.right(x))
        return AsksTwice.apply(left, left.exp()), AsksTwice.apply(right, right.exp())


class Branches(nn.Module):
    """One such block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TwoBranches()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.layers[0](x)
        return left.sum(), right.sum()


@pytest.mark.parametrize("retained", [(False, True, True, False), (True, False)], ids=str)
def test_backward_through_one_part_of_a_block_and_then_again_and_again_through_the_other(
    retained: Sequence[bool], attach: Attach
) -> None:
    """The first backward leaves nothing to rebuild from if its graph was not retained; what it made is still there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Branches()
        x = torch.randn(3, 5, WIDTH)
    reference = copy.deepcopy(model)
    attach(model, plans.make_plan(model, blocks=["layers.0"]), blocks=["layers.0"])
    for _ in range(2):
        found = []
        for each in (model, reference):
            each.zero_grad(set_to_none=True)
            left, right = each(x)
            left.backward(retain_graph=retained[0])
            for retain in retained[1:]:
                right.backward(retain_graph=retain)
            found.append({name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None})
        assert len(found[0]) == 4
        assert_bit_equal(*found)
    del left, right
    assert live_frames() == 0


def test_a_block_that_runs_twice_in_one_forward(attach: Attach) -> None:
    def shared(seed: int = 0) -> nn.Module:
        model = PLAIN.build(seed=seed)
        model.layers[2] = model.layers[0]
        return model

    model, reference = shared(), shared()
    attach(model, plans.make_plan(model, blocks=["layers.0", "layers.1"]), blocks=["layers.0", "layers.1"])
    for step in range(2):
        inputs = PLAIN.make_inputs(2, 9, seed=step)
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_double_backward_gives_the_same_or_says_that_it_cannot(choice: plans.Choose | None, attach: Attach) -> None:
    """A stored or rebuilt slot has no graph (R1), so a second derivative through it must not come out as a number."""
    model, reference = PLAIN.build(), PLAIN.build()
    attach(model) if choice is None else attach.chosen(PLAIN, choice, model)
    warm_up(PLAIN, model)
    want = penalty(reference)
    try:
        got = penalty(model)
    except RuntimeError as error:
        assert "double backward" in str(error) or "does not require grad" in str(error)  # noqa: PT017
    else:
        assert_bit_equal(got, want)


def penalty(model: nn.Module) -> Gradients:
    """Gradients of a gradient penalty."""
    model.zero_grad(set_to_none=True)
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    weights = [layer.up.weight for layer in model.layers]
    first = torch.autograd.grad(loss, weights, create_graph=True)
    sum(grad.square().sum() for grad in first).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_an_optimizer_step_between_forward_and_backward_is_an_error(attach: Attach) -> None:
    model = LLAMA.build()
    attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm_up(LLAMA, model)
    loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
    LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=1)).backward()
    optimizer.step()
    with pytest.raises((RecoveryError, RuntimeError), match="modified"):
        loss.backward()


def test_detaching_between_forward_and_backward_loses_nothing(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = attach(model)
    warm_up(LLAMA, model)
    inputs = LLAMA.make_inputs(2, 9, seed=0)
    loss = LLAMA.loss(model, inputs)
    runtime.detach()
    loss.backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_bit_equal(got, LLAMA.gradients(reference, inputs))


@pytest.mark.parametrize("name", ["plain", "tuple", "in_place"])
def test_many_lengths_one_after_another(name: str, attach: Attach) -> None:
    case = MODELS[name]
    model, reference = case.build(), case.build()
    attach(model, plans.make_plan(model, tokens=(20,)))
    for length in (4, 30, 5, 11, 10, 4):  # some beyond the plan
        inputs = case.make_inputs(2, length, seed=length)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))
