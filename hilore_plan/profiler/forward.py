"""What a block's forward holds while it runs, if nothing that it saves for backward is kept.

What a plan keeps comes on top as soon as forward itself would let go of it; so the order of saving and letting go is
recorded along with the bytes between.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hilore_plan.graph.signature import Call
from hilore_plan.profiler.memory import Recorder


@dataclass(frozen=True)
class ForwardMeasure:
    """A forward that keeps nothing, without what it was given.

    `values` are in the order in which it saves them and, the second time that one comes, lets go of it; what is alive
    to the end comes once. `peak_bytes` are the most before the first of these events, and from each to the next.
    """

    values: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def measure_forward(block: nn.Module, call: Call, slot_values: Sequence[int], device: torch.device) -> ForwardMeasure:
    """Run a block's forward once, with gradients, and drop all that it saves.

    Args:
        block: the block.
        call: its arguments.
        slot_values: the value of each slot, in the order of saving; none if nobody knows them.
        device: where its memory is counted.
    """
    watch = _ForwardWatch(slot_values, Recorder(device))
    with torch.enable_grad():  # copies that are no leaves: a block may change what it is given in place
        args, kwargs = call.rebuild([t.clone() if t.requires_grad else t for t in call.tensors])
        preserved = torch.random.fork_rng() if device.type == "cpu" else nullcontext()
        with preserved, watch.recorder, saved_tensors_hooks(watch.pack, _unpack):
            output = block(*args, **kwargs)
            watch.stop()
    del output
    peaks = [segment.peak_bytes for segment in watch.recorder.trace.segments]
    return ForwardMeasure(tuple(watch.values), tuple(peaks[: len(watch.values) + 1]))


def _unpack(_: object) -> torch.Tensor:
    raise RuntimeError("nothing was kept for a backward")


class _ForwardWatch:
    """The pack hook: marks when a value is first saved, and when its memory is let go of."""

    def __init__(self, slot_values: Sequence[int], recorder: Recorder) -> None:
        self.recorder = recorder
        self.values: list[int] = []
        self._slot_values = slot_values
        self._slots = count()
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def pack(self, tensor: torch.Tensor) -> None:
        slot = next(self._slots)
        value = self._slot_values[slot] if slot < len(self._slot_values) else None
        if value is None or value in self.values:
            return
        self._mark(value)
        self._storages.append(weakref.ref(tensor.untyped_storage(), lambda _: self._mark(value)))

    def stop(self) -> None:
        """What is alive now is not let go of by forward."""
        self._storages.clear()

    def _mark(self, value: int) -> None:
        self.values.append(value)
        self.recorder.mark(str(value))
