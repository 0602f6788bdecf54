"""What every block saves in one forward, kept so that backward can be run again and again with some of it replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hilore_plan.graph.signature import Call, flatten_call
from hilore_plan.profiler.fp32 import DistinctCasts


class Tape:
    """One block's forward: its call, its differentiable outputs, and its slots in the order of saving.

    `forward` is what is recorded; `replaced` holds what backward is handed in place of a slot.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.slots: list[torch.Tensor] = []
        self.replaced: dict[int, torch.Tensor] = {}
        self.call: Call | None = None
        self.outputs: list[torch.Tensor] = []

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The differentiable tensors that the block was called with."""
        return [tensor for tensor in self.call.tensors if tensor.requires_grad] if self.call else []

    def pack(self, tensor: torch.Tensor) -> int:
        """The pack hook: a slot's number stands for it."""
        self.slots.append(tensor.detach())
        return len(self.slots) - 1

    def unpack(self, slot: int) -> torch.Tensor:
        """The unpack hook."""
        replaced = self.replaced.get(slot)
        return self.slots[slot] if replaced is None else replaced

    def clear(self) -> None:
        """Lets go of the forward, whose graph holds this tape and is held by it."""
        self.__init__(self.forward)  # type: ignore[misc]


@contextmanager
def taped(blocks: Sequence[nn.Module], *, distinct_casts: bool) -> Iterator[list[Tape]]:
    """The tapes of `blocks`, which every forward within records anew.

    Args:
        blocks: modules that run once in a forward.
        distinct_casts: whether the blocks run under `DistinctCasts`.
    """
    tapes = [Tape(casting(block.forward, distinct_casts)) for block in blocks]
    before = [block.__dict__.get("forward") for block in blocks]
    for block, tape in zip(blocks, tapes, strict=True):
        block.forward = _recording(tape)
    try:
        yield tapes
    finally:
        for block, forward, tape in zip(blocks, before, tapes, strict=True):
            tape.clear()
            block.__dict__.pop("forward")
            if forward is not None:
                block.forward = forward


def casting(forward: Callable[..., Any], distinct_casts: bool) -> Callable[..., Any]:
    """The forward, under `DistinctCasts` if so."""

    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        with DistinctCasts() if distinct_casts else nullcontext():
            return forward(*args, **kwargs)

    return run


def _recording(tape: Tape) -> Callable[..., Any]:
    @functools.wraps(tape.forward)
    def run(*args: object, **kwargs: object) -> object:
        tape.clear()
        tape.call = flatten_call(args, kwargs)
        with saved_tensors_hooks(tape.pack, tape.unpack):
            output = tape.forward(*args, **kwargs)
        tape.outputs = [t for t in tree_leaves(output) if torch.is_tensor(t) and t.requires_grad]
        return output

    return run
