"""Puts markers on a recorded update: where each block's forward begins and ends, and each stage of its backward.

| marker | begins |
| --- | --- |
| `forward:b` | block b's forward |
| `end:b` | what lies between block b and the next; after the last block: the head |
| `backward:b:0` | block b's backward, with the gradient of its output |
| `backward:b:p:s` | what follows when slot s is first asked for, p being the latest stage that has begun |
| `embedding` | what lies before the first block, once that block's backward is over |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hilore_plan.profiler.memory import Recorder

Packed = tuple[torch.Tensor, int]


class BlockWatch:
    """Context manager: while it lasts, each forward and backward of `blocks` marks `recorder`.

    Args:
        blocks: the model's blocks in order.
        slot_stages: for each block the stage of each of its slots, in the order of saving; empty: nobody knows them,
            and they are not marked.
        recorder: where the markers go.
    """

    def __init__(self, blocks: Sequence[nn.Module], slot_stages: Sequence[Sequence[int]], recorder: Recorder) -> None:
        self._blocks = blocks
        self._slot_stages = slot_stages
        self._recorder = recorder
        self._handles: list[Any] = []
        self._packing: list[ExitStack] = []

    def __enter__(self) -> BlockWatch:
        for index, block in enumerate(self._blocks):
            self._handles.append(block.register_forward_pre_hook(self._before(index), with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._after(index), always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, index: int) -> Callable[..., None]:
        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index == 0:
                self._mark_gradient((args, kwargs), "embedding")
            self._recorder.mark(f"forward:{index}")
            stack = ExitStack()
            stack.enter_context(self._slots_of(index))
            self._packing.append(stack)

        return begin

    def _after(self, index: int) -> Callable[..., None]:
        def end(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
            self._packing.pop().close()
            self._recorder.mark(f"end:{index}")
            self._mark_gradient(output, f"backward:{index}:0")

        return end

    def _mark_gradient(self, tree: object, name: str) -> None:
        """Marks `name` as soon as the gradient of the first differentiable tensor of `tree` is there."""
        tensors = [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf) and leaf.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda _: self._recorder.mark(name))  # type: ignore[no-untyped-call]

    def _slots_of(self, index: int) -> saved_tensors_hooks:
        """Hooks that keep what is saved as it is, and tell when a slot is first asked for."""
        stages = self._slot_stages[index]
        numbers = count()
        asked: set[int] = set()
        latest = 0

        def pack(tensor: torch.Tensor) -> Packed:
            # detached, or an output that was saved would keep its own graph alive
            return tensor.detach(), next(numbers)

        def unpack(packed: Packed) -> torch.Tensor:
            nonlocal latest
            tensor, slot = packed
            if stages and slot not in asked:
                asked.add(slot)
                latest = max(latest, stages[slot])
                self._recorder.mark(f"backward:{index}:{latest}:{slot}")
            return tensor

        return saved_tensors_hooks(pack, unpack)
