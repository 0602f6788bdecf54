"""What a forward holds that keeps nothing, and when it saves values and lets go of them."""

from __future__ import annotations

import torch
from torch import nn

from hilore_plan.graph.signature import flatten_call
from hilore_plan.profiler.forward import measure_forward

ROWS, WIDTH = 64, 32
SIZE = ROWS * WIDTH * 4
CPU = torch.device("cpu")


class Steps(nn.Module):
    """exp, whose output is saved twice, tanh, saved to the end, and a sum, which saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = x.exp()
        two = one.tanh() * one
        del one
        return two + x


def test_the_order_of_saving_and_letting_go_with_the_bytes_between() -> None:
    """Slots: exp's output, tanh's, and both again for the product; here they are values 7 and 9."""
    call = flatten_call((torch.randn(ROWS, WIDTH, requires_grad=True),), {})
    measure = measure_forward(Steps(), call, [7, 9, 9, 7], CPU)
    assert measure.values[:2] == (7, 9)
    assert sorted(measure.values[2:]) == [7, 9]  # gone in one order or the other when the product is there
    assert measure.peak_bytes[:3] == (SIZE, 2 * SIZE, 3 * SIZE)
    assert measure.peak_bytes[-1] <= 2 * SIZE  # the product and the sum


def test_what_is_alive_to_the_end_is_never_let_go_of() -> None:
    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    measure = measure_forward(Exp(), flatten_call((torch.randn(ROWS, WIDTH, requires_grad=True),), {}), [3], CPU)
    assert measure.values == (3,)
    assert max(measure.peak_bytes) == SIZE


def test_a_block_may_change_what_it_is_given() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2.0).sin()

    given = torch.ones(ROWS, WIDTH, requires_grad=True)
    measure = measure_forward(InPlace(), flatten_call((given,), {}), [0], CPU)
    assert measure.values == (0,)
    assert (given == 1.0).all()


def test_slots_that_nobody_knows_are_not_told_apart() -> None:
    call = flatten_call((torch.randn(ROWS, WIDTH, requires_grad=True),), {})
    measure = measure_forward(Steps(), call, (), CPU)
    assert measure.values == ()
    assert measure.peak_bytes == (3 * SIZE,)
