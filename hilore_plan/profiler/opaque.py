"""Blocks that cannot be captured: classes with one op, the whole forward.

Without a graph the runtime checkpoints such a block, or lets it be if its forward changes its own state
(`runtime.fallback`). In the planner's terms: the inputs are kept, and `forward.saved`, all that autograd saves inside,
is no unit to decide on; it is rebuilt by running forward again, or forced where forward must not run twice.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hilore_plan.graph.capture import block_state, input_names
from hilore_plan.graph.recovery_units import parameter_descriptions
from hilore_plan.graph.signature import Call
from hilore_plan.profiler.clock import seconds_of
from hilore_plan.profiler.memory import Recorder, storage_bytes
from hilore_plan.profiler.ops import OpMeasures, storage_bytes_of
from hilore_plan.runtime.fallback import Fallback
from hilore_plan.schema.profile import BlockClass, Op, Value
from hilore_plan.schema.record import UNCAPTURED

REPEATS = 5
MOST_NAMES = 3


class UncapturedWarning(UserWarning):
    """A block cannot be captured: the plan treats it as a whole."""


@dataclass(frozen=True)
class OpaqueClass:
    """A class of blocks without a graph."""

    record: BlockClass

    @property
    def first(self) -> int:
        """The block that stands for the class where it is measured."""
        return self.record.blocks[0]

    @property
    def slot_stages(self) -> Sequence[int]:
        """Empty: all slots, however many there are this time, belong to stage 0."""
        return ()

    @property
    def slot_values(self) -> Sequence[int]:
        """Empty, like `slot_stages`."""
        return ()

    @property
    def own_inputs(self) -> list[int]:
        """Places, among a call's tensors, of the inputs that are alive for this block alone."""
        return [place for place, value in enumerate(self.record.values) if value.kind == "input" and not value.shared]

    @property
    def checkpointed(self) -> bool:
        """Whether backward runs forward again; else the block is stored."""
        return self.record.ops[0].recomputable

    def measure(self, block: nn.Module, call: Call) -> OpMeasures:
        """Seconds of a rerun, and bytes of the inputs, the block's state and all that is saved inside."""
        with _generators_kept(block, call):
            saved = _saved(block, call)
            seconds = _rerun_seconds(block, call, saved.slots)
        given = [*call.tensors, *block_state(block).values()]
        count = len(self.record.values)
        return OpMeasures(
            op_seconds=(seconds,),
            op_working_bytes=(0,),  # a rerun's are in the stage's
            value_bytes=(*map(storage_bytes_of, given), saved.inside_bytes),
            narrow_bytes=(0,) * count,
            narrow_seconds=(0.0,) * count,
        )

    def rerun_seconds(self, measures: OpMeasures) -> float:
        """What checkpointing one block runs again."""
        return sum(measures.op_seconds)

    def rerun_working_bytes(self, block: nn.Module, call: Call) -> int:
        """What a rerun needs beyond what it saves: its temporaries, while the gradient of the output waits."""
        with _generators_kept(block, call):
            saved = _saved(block, call)
            copies = _copies(call)
            with Recorder(_device(block, call)) as recorder:
                kept = _run_again(block, call, copies, saved.slots)
        del kept
        return saved.output_bytes + max(0, recorder.trace.peak_bytes - saved.inside_bytes)


def opaque_class(
    name: str,
    reason: str,
    blocks: Sequence[nn.Module],
    calls: Sequence[Call],
    members: tuple[int, ...],
    shared_places: Collection[int],
) -> OpaqueClass:
    """The class of `members`, which cannot be captured for `reason`; its first member runs to see what it saves.

    Args:
        name: of the class.
        reason: why there is no graph.
        blocks: all blocks.
        calls: the call of each of them.
        members: numbers of the class's blocks, ascending.
        shared_places: the tensors of a call that are alive whatever happens to one block.
    """
    block, call = blocks[members[0]], calls[members[0]]
    with _generators_kept(block, call):
        repeatable = _is_repeatable(block, call)
        saved = _saved(block, call)
    values = [*_inputs(block, call, saved.inputs, shared_places), *_state_values(block)]
    inside = Value(name="forward.saved", kind="op", dtype="mixed", slot_stages=(0,))
    forward = Op(name="forward", inputs=tuple(range(len(values))), outputs=(len(values),), recomputable=repeatable)
    record = BlockClass(
        name=name,
        graph_hash=UNCAPTURED + reason,
        blocks=members,
        parameters=parameter_descriptions(block),
        stages=1,
        values=(*values, inside),
        ops=(forward,),
    )
    return OpaqueClass(record)


def warn_of_opaque(classes: Iterable[OpaqueClass], names: Sequence[str]) -> None:
    """One warning per reason: which blocks, why, and what happens to them."""
    found: dict[tuple[str, bool], list[int]] = {}
    for c in classes:
        found.setdefault((c.record.uncaptured or "", c.checkpointed), []).extend(c.record.blocks)
    for (reason, checkpointed), blocks in found.items():
        shown = ", ".join(names[block] for block in sorted(blocks)[:MOST_NAMES])
        more = f" and {len(blocks) - MOST_NAMES} more" if len(blocks) > MOST_NAMES else ""
        treated = "checkpointed" if checkpointed else "stored, as its forward changes its own state"
        what = f"block{'s' if len(blocks) > 1 else ''} {shown}{more}"
        warnings.warn(f"hilore: {what}: cannot be captured ({reason}): {treated}", UncapturedWarning, stacklevel=2)


def _inputs(block: nn.Module, call: Call, saved: Collection[int], shared: Collection[int]) -> Iterator[Value]:
    for place, (name, tensor) in enumerate(zip(input_names(call, block.forward), call.tensors, strict=True)):
        stages = (0,) if place in saved else ()
        yield Value(
            name=name,
            kind="input",
            dtype=_dtype_name(tensor),
            slot_stages=stages,
            keepable=place not in shared,
            shared=place in shared,
        )


def _state_values(block: nn.Module) -> Iterator[Value]:
    for name, tensor in block_state(block).items():
        yield Value(name=name, kind="parameter", dtype=_dtype_name(tensor))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_repeatable(block: nn.Module, call: Call) -> bool:
    """Whether the runtime would checkpoint the block."""
    leaves = list(call.leaves)
    for position, tensor in zip(call.positions, _copies(call), strict=True):
        leaves[position] = tensor
    fallback = Fallback(block, block.forward)
    fallback.run(replace(call, leaves=tuple(leaves)))
    return bool(fallback.repeatable)


@dataclass(frozen=True)
class _Saved:
    """What autograd saves in one forward: `slots` tensors, among them views of the inputs at places `inputs`.

    `inside_bytes` are the storages that are neither inputs nor the block's own, `output_bytes` those of a gradient of
    the output.
    """

    slots: int
    inputs: frozenset[int]
    inside_bytes: int
    output_bytes: int


def _saved(block: nn.Module, call: Call) -> _Saved:
    copies = _copies(call)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    output = _forward(block, call, copies, pack)
    places = {_storage(tensor): place for place, tensor in enumerate(copies)}
    own = {_storage(tensor) for tensor in _own_tensors(block)}
    inside = [tensor for tensor in kept if _storage(tensor) not in own and _storage(tensor) not in places]
    leaves = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.requires_grad]
    return _Saved(
        slots=len(kept),
        inputs=frozenset(places[found] for tensor in kept if (found := _storage(tensor)) in places),
        inside_bytes=storage_bytes(inside),
        output_bytes=sum(leaf.numel() * leaf.element_size() for leaf in leaves),
    )


def _own_tensors(block: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    yield from block_state(block).values()
    for module in block.modules():
        yield from (value for value in vars(module).values() if torch.is_tensor(value))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _rerun_seconds(block: nn.Module, call: Call, slots: int) -> float:
    device = _device(block, call)
    taken = []
    for number in range(1 + REPEATS):
        copies = _copies(call)
        seconds = seconds_of(lambda given=copies: _run_again(block, call, given, slots), device)  # type: ignore[misc]
        if number:  # the first one warms up
            taken.append(seconds)
    return statistics.median(taken)


class _LastSlotError(Exception):
    """Everything is saved that will be: here torch's checkpoint ends its rerun too."""


def _run_again(block: nn.Module, call: Call, inputs: Sequence[torch.Tensor], slots: int) -> list[torch.Tensor]:
    """Forward as a non-reentrant checkpoint runs it in backward: up to its last slot. Returns what it saves."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        if len(kept) == slots:
            raise _LastSlotError
        return kept[-1]

    with suppress(_LastSlotError):
        _forward(block, call, inputs, pack)
    return kept


def _forward(block: nn.Module, call: Call, inputs: Sequence[torch.Tensor], pack: Any) -> Any:
    args, kwargs = call.rebuild(inputs)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        return block.forward(*args, **kwargs)


def _copies(call: Call) -> list[torch.Tensor]:
    """Inputs that forward may write into; no leaves, which autograd does not let be changed in place.

    An expanded tensor, which nothing can write into, is taken as it is: a copy of it would be larger.
    """
    with torch.enable_grad():
        return [tensor if _is_expanded(tensor) else tensor.clone() for tensor in call.tensors]


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _device(block: nn.Module, call: Call) -> torch.device:
    return next(iter((*call.tensors, *block.parameters()))).device


@contextmanager
def _generators_kept(block: nn.Module, call: Call) -> Iterator[None]:
    device = _device(block, call)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
