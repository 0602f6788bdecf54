"""With the garbage collector off, nothing piles up: not over steps, not after errors, not with a live graph."""

from __future__ import annotations

import plans
import pytest
import torch
from models import Case
from runtime.rig import LLAMA, PLAIN, Attach, collector_off, live_tensors, warm_up
from torch import nn

from hilore_plan.runtime.frame import live_frames

STEPS = 50
LENGTHS = (9, 5, 12, 7)


def step(case: Case, model: nn.Module, index: int) -> None:
    """Two micro-batches whose gradients add up, and an update."""
    for length in LENGTHS[index % 2 :: 2]:
        case.loss(model, case.make_inputs(2, length, seed=index)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-4)
                parameter.grad = None


@pytest.mark.parametrize(
    "choice", [None, plans.store, plans.cast, plans.seeded(2)], ids=["recompute", "store", "cast", "mixed"]
)
def test_memory_does_not_grow_over_fifty_steps(choice: plans.Choose | None, attach: Attach) -> None:
    model = LLAMA.build(dtype=torch.bfloat16)
    attach(model) if choice is None else attach.chosen(LLAMA, choice, model)
    with collector_off():
        for index in range(2):
            step(LLAMA, model, index)
        before = live_tensors()
        for index in range(STEPS):
            step(LLAMA, model, index)
            assert live_frames() == 0
        assert live_tensors() == before


def test_a_forward_without_backward_is_freed_with_its_loss(attach: Attach) -> None:
    model = LLAMA.build()
    attach(model)
    warm_up(LLAMA, model)
    with collector_off():
        before = live_tensors()
        for index in range(5):
            loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=index))
            assert live_frames() == 6
            del loss
            assert live_frames() == 0
        assert live_tensors() == before


def test_a_backward_that_stops_half_way_is_freed(attach: Attach) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    def stop(grad: torch.Tensor) -> None:
        raise Stop

    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    hook = model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(stop) and None)
    with collector_off():
        before = live_tensors()
        for index in range(3):
            with pytest.raises(Stop):
                PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=index)).backward()
        model.zero_grad(set_to_none=True)
        assert live_frames() == 0
        assert live_tensors() == before
    hook.remove()


def test_stored_bytes_are_those_of_the_plan(attach: Attach) -> None:
    """All-recompute keeps no more than each block's arguments: counted by storage, as memory is."""
    kept = {}
    for name, choice in (("store", plans.store), ("recompute", None)):
        model = PLAIN.build()
        attach(model) if choice is None else attach.chosen(PLAIN, choice, model)
        warm_up(PLAIN, model)
        before = storage_bytes()
        loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
        kept[name] = storage_bytes() - before
        del loss
    values = [value for value in attach.graphs(PLAIN, PLAIN.build())[0].values if value.kind == "op" and value.slots]
    widths = {"up": 64, "gelu": 64, "norm": 32}
    assert len(values) >= len(widths) - 1
    assert kept["store"] - kept["recompute"] >= 3 * 2 * 9 * (64 + 64) * 4


def storage_bytes() -> int:
    """Bytes that live tensors occupy, each storage counted once."""
    import gc

    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    real = [tensor for tensor in tensors if tensor.device.type == "cpu" and type(tensor) is torch.Tensor]
    return sum({s.data_ptr(): s.nbytes() for tensor in real if (s := tensor.untyped_storage())}.values())
