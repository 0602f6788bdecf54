"""Faults 18 and 19: bytes that are counted wrong, or counted for another training than the one to come."""

from __future__ import annotations

from collections.abc import Callable

import plans
import pytest
import torch
from models import WIDTH, Plain, Stack
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hilore_plan.errors import PlanMismatchError
from hilore_plan.profiler.calls import record_calls
from hilore_plan.profiler.classes import CapturedClass, find_classes
from hilore_plan.profiler.memory import storage_bytes
from hilore_plan.profiler.ops import measure_ops
from hilore_plan.profiler.outside import stored_bytes
from hilore_plan.runtime.attach import apply

BATCH, LENGTH = 3, 11
TOKENS = BATCH * LENGTH


class Pins(Plain):
    """Saves one column of a wide value, and a value expanded to the length from one per row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        column = wide[..., 5:6] * x
        spread = torch.tanh(x.mean(1, keepdim=True)).expand_as(x)
        return column * spread


class Adapted(Plain):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h) + self.b(self.a(h))))


def stack(block: Callable[[], nn.Module], frozen: tuple[str, ...] = ()) -> Stack:
    torch.manual_seed(0)
    model = Stack(block, 1).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def measured(model: Stack) -> tuple[CapturedClass, int, int]:
    """The class of the one block, the bytes that it counts as stored, and those that autograd keeps of it."""
    block = model.layers[0]
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    calls = record_calls([block], lambda: model(ids))
    (found,) = find_classes([block], calls)
    assert isinstance(found, CapturedClass)
    counted = stored_bytes(found.record, measure_ops(found.graph, block, calls[0], repeats=1).value_bytes)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor.detach()

    args, kwargs = calls[0].rebuild(calls[0].tensors)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(*args, **kwargs)
    del output
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    return found, counted, storage_bytes(t for t in saved if t.untyped_storage().data_ptr() not in own)


def test_18_a_view_counts_as_all_that_it_pins_and_an_expanded_tensor_as_little() -> None:
    _, counted, kept = measured(stack(Pins))
    assert counted == kept
    # x and its product with the column, the value that the column is of, and one number per row of an expanded one
    assert counted == 2 * 4 * TOKENS * WIDTH + 4 * TOKENS * 2 * WIDTH + 4 * BATCH * WIDTH


def test_19_a_frozen_layer_is_measured_as_it_trains() -> None:
    """A frozen layer saves its weight and no input; what its adapter saves goes as well where that is frozen too."""
    (full, all_kept), (adapted, some_kept), (frozen, least_kept) = (
        measured(stack(Adapted, names))[1:] for names in ((), ("up.", "down."), ("up.", "down.", "a.", "b."))
    )
    assert (full, adapted, frozen) == (all_kept, some_kept, least_kept)
    assert adapted - frozen == 4 * TOKENS * WIDTH + 4 * TOKENS * 2  # inputs of `a` and `b`
    assert full == adapted  # `up` reads what `a` reads, and `down` what tanh saves in any case


def test_19_a_plan_for_full_training_is_refused_for_an_adapter() -> None:
    plan = plans.make_plan(stack(Adapted))
    with pytest.raises(PlanMismatchError, match=r"down\.\w+ of layers\.0 is .* trainable, here") as caught:
        apply(stack(Adapted, ("up.", "down.")), plan)
    assert "profile the model as it trains" in caught.value.hint
