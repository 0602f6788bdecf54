"""A frame: one block's forward in flight, as what its saved tensors have become.

Autograd holds `Handle`s. A handle has the tensor itself, or its owner: a `Stage` that rebuilds it, a `Narrowed`
value that is widened, or a `Compressed` one that is decoded. Owners die with their last handle (R5).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from hilore_plan.errors import RecoveryError
from hilore_plan.graph.program import Program
from hilore_plan.graph.sizes import Geometry, Number
from hilore_plan.runtime.changed import changed_in_place
from hilore_plan.runtime.kept import Source
from hilore_plan.runtime.state import BlockState

Kind = tuple[torch.dtype, torch.device]

_live: weakref.WeakSet[Stage] = weakref.WeakSet()


def live_frames() -> int:
    """How many stages of frames wait for their backward, in all runtimes: 0 between steps."""
    return len(_live)


def graph_is_retained() -> bool:
    """Whether what runs now may run again: a backward with `retain_graph`, or no backward at all."""
    retained: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return retained


class Owner(Protocol):
    """Who gives a handle its tensor when backward asks."""

    def take(self, slot: int) -> torch.Tensor:
        """The saved tensor of a slot."""


class Handle:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("owner", "slot", "tensor", "version")

    def __init__(self, slot: int, tensor: torch.Tensor | None, owner: Owner | None) -> None:
        self.slot = slot
        self.tensor = tensor
        self.owner = owner
        self.version = 0 if tensor is None else tensor._version

    def give_up(self, owner: Owner) -> None:
        """Let go of the tensor: `owner` answers for it from now on."""
        self.tensor = None
        self.owner = owner

    def take(self) -> torch.Tensor:
        """The tensor from the owner, for good if the graph is not retained: this handle goes with the node that asks.

        Until then it may ask again, and what the owner's program reads is gone by then.
        """
        assert self.owner is not None
        tensor = self.owner.take(self.slot)
        if not graph_is_retained():
            self.tensor, self.version, self.owner = tensor, tensor._version, None
        return tensor


def unpack(handle: Handle) -> torch.Tensor:
    """The unpack hook: the saved tensor, bit for bit.

    Raises:
        RecoveryError: what was kept has been changed in place.
    """
    tensor = handle.tensor
    if tensor is None:
        return handle.take()
    if tensor._version != handle.version:  # R2
        raise changed_in_place(f"saved tensor {handle.slot} of shape {list(tensor.shape)}")
    return tensor


@dataclass
class Clock:
    """Seconds spent in recovery programs, and how many ran."""

    seconds: float = 0.0
    runs: int = 0


class Stage:
    """One stage of a frame: rebuilds its slots when the first of them is asked for.

    Once it has done so for a graph that is not retained, it is spent: what its program read is let go of. A kept value
    then lives as long as without a plan, and an argument that was kept for the program alone no longer.
    """

    __slots__ = (
        "__weakref__",
        "carried",
        "clock",
        "following",
        "geometries",
        "kinds",
        "notes",
        "previous",
        "program",
        "sizes",
        "sources",
        "spent",
        "state",
        "values",
    )

    def __init__(
        self,
        program: Program,
        sizes: tuple[Number, ...],
        geometries: Sequence[Geometry],
        kinds: Sequence[Kind],
        state: BlockState,
        clock: Clock,
    ) -> None:
        self.program = program
        self.sizes = sizes
        self.geometries = geometries
        self.kinds = kinds
        self.state = state
        self.notes = state.notes(program.state)
        self.clock = clock
        self.sources: Sequence[Source] | None = None
        self.carried: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.previous: Stage | None = None
        self.following: weakref.ref[Stage] | None = None
        self.spent = False
        _live.add(self)

    def follow(self, previous: Stage) -> None:
        """This stage reads what `previous` computes."""
        self.previous = previous
        previous.following = weakref.ref(self)

    def take(self, slot: int) -> torch.Tensor:
        """See `Owner.take`. A second request for a slot runs the program again.

        Raises:
            RecoveryError: a parameter or kept value was changed in place, or the program gives another layout.
        """
        if slot not in self.values:
            self.rebuild()
        if self.spent and graph_is_retained():
            return self.values[slot]
        return self.values.pop(slot)  # R5

    def rebuild(self) -> None:
        """Run the program; hand on what the following stage reads (R6)."""
        program = self.program
        if self.previous is not None:
            self.previous.rebuild()
        if self.sources is None:
            raise RecoveryError("backward began before the block's forward was over", "run one after the other")
        started = perf_counter()
        state = self.state.read(program.state, self.notes)
        sources = [source.base() for source in self.sources]
        carried = [self.carried[value] for value in program.carried]
        with torch.no_grad(), _without_autocast(_device_type(state, sources)):
            results = program.run(*self.sizes, *state, *sources, *carried)
        self.clock.seconds += perf_counter() - started
        self.clock.runs += 1
        self._receive(results)
        if not graph_is_retained():
            self.let_go()

    def let_go(self) -> None:
        """Nothing will be rebuilt here any more."""
        self.sources, self.carried, self.previous = (), {}, None  # R5
        self.spent = True

    def _receive(self, results: tuple[torch.Tensor, ...]) -> None:
        program = self.program
        count = len(program.slots)
        for slot, tensor in zip(program.slots, results[:count], strict=True):
            self._check(slot, tensor)
            self.values[slot] = tensor
        following = self.following() if self.following is not None else None
        if following is not None:
            following.carried = dict(zip(program.carries, results[count:], strict=True))
            following.previous = None  # R5

    def _check(self, slot: int, tensor: torch.Tensor) -> None:
        size, stride, _ = self.geometries[slot]
        kind = tensor.dtype, tensor.device
        if tensor.shape == size and same_strides(size, tensor.stride(), stride) and kind == self.kinds[slot]:  # R4
            return
        found = f"size {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}, {tensor.device}"
        dtype, device = self.kinds[slot]
        raise RecoveryError(
            f"saved tensor {slot} was rebuilt with {found}; "
            f"it was saved with size {list(size)}, strides {list(stride)}, {dtype}, {device}",
            "this is a fault in hilore_plan: detach the plan and report the model and its call",
        )


def same_strides(size: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides agree where they mean something: in dimensions of one element they do not."""
    return one == other or all(a == b for n, a, b in zip(size, one, other, strict=True) if n > 1)


def _device_type(state: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> str:
    return next((tensor.device.type for tensor in (*sources, *state)), "cpu")


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """The casts that autocast made are part of the program; it must not add its own."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()
