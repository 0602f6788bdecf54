"""The graphs of a model's blocks: each variant captured when first met, shared by all blocks that are alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from hilore_plan.errors import CaptureError
from hilore_plan.graph.capture import Forward, capture
from hilore_plan.graph.recovery_units import BlockGraph, block_graph
from hilore_plan.graph.signature import PLAIN, Call, mode_key, tensor_key
from hilore_plan.runtime.state import BlockState

# more than this for one kind of block means that something in the call is never the same twice
MOST_VARIANTS = 16
POSITION_NAMES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


@dataclass
class Captured:
    """The graphs of one signature, which differ in their guards, and which of them each set of shapes needs."""

    graphs: list[BlockGraph] = field(default_factory=list)
    by_shapes: dict[tuple[torch.Size, ...], BlockGraph] = field(default_factory=dict)


class Variants:
    """Captures and remembers block graphs."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, Captured] = {}
        # texts, not errors: an error that is kept, or raised again, keeps the tensors of its frames alive
        self._failures: dict[Hashable, str] = {}
        self._count: dict[Hashable, int] = {}

    @property
    def captures(self) -> int:
        """How many graphs have been captured."""
        return sum(self._count.values())

    def find(
        self,
        kind: Hashable,
        block: nn.Module,
        modules: tuple[nn.Module, ...],
        state: BlockState,
        call: Call,
        forward: Forward,
    ) -> BlockGraph:
        """The graph that this call of a block runs.

        Args:
            kind: equal for blocks that may share graphs.
            block: the block, captured if the graph is new.
            modules: the block and its submodules.
            state: its parameters and buffers.
            call: the call's arguments.
            forward: the block's own forward.

        Raises:
            CaptureError: it cannot be captured.
        """
        key = (kind, _signature(modules, state, call))
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = Captured()
        shapes = tuple(tensor.shape for tensor in call.tensors)
        graph = captured.by_shapes.get(shapes)
        if graph is None:
            fitting = (graph for graph in captured.graphs if graph.capture.fits(call.tensors))
            graph = next(fitting, None) or self._capture(key, kind, block, call, forward)
            captured.by_shapes[shapes] = graph
        return graph

    def _capture(self, key: Hashable, kind: Hashable, block: nn.Module, call: Call, forward: Forward) -> BlockGraph:
        if key in self._failures:
            raise CaptureError(self._failures[key])
        if self._count.get(kind, 0) >= MOST_VARIANTS:
            raise CaptureError(f"more than {MOST_VARIANTS} different kinds of calls")
        try:
            graph = block_graph(capture(block, call, forward))
        except CaptureError as error:
            self._failures[key] = error.message
            raise
        self._count[kind] = self._count.get(kind, 0) + 1
        self._captured[key].graphs.append(graph)
        return graph


def _signature(modules: tuple[nn.Module, ...], state: BlockState, call: Call) -> Hashable:
    tensors = call.tensors
    device_type = tensors[0].device.type if tensors else "cpu"
    parameters = tuple((tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in state.tensors())
    return call.structure_key(), tuple(map(tensor_key, tensors)), parameters, mode_key(modules, device_type)


def kind_of(block: nn.Module) -> Hashable:
    """What blocks that may share graphs have in common: classes and plain attributes, but not their position."""
    return tuple((name, type(module), _plain_attributes(module)) for name, module in block.named_modules())


def _plain_attributes(module: nn.Module) -> Hashable:
    plain = (
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and name not in POSITION_NAMES and name != "training"
    )
    return tuple(sorted(((name, type(value).__name__, repr(value)) for name, value in plain)))
