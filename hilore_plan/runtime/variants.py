"""The graphs of a model's blocks: each variant captured when first met, shared by all blocks that are alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from hilore_plan.errors import CaptureError
from hilore_plan.graph.capture import Forward, capture
from hilore_plan.graph.recovery_units import BlockGraph, block_graph
from hilore_plan.graph.signature import Call, mode_key, tensor_key
from hilore_plan.progress import Progress, StatusLine
from hilore_plan.runtime.attributes import Attributes, plain_attributes
from hilore_plan.runtime.state import BlockState

# more than this for one kind of block means that something in the call is never the same twice
MOST_VARIANTS = 16
# attributes that have had more values than this without a change of the graph do not count any more (see `unsettled`)
MOST_TWINS = 3

Key = tuple[Hashable, Hashable]


@dataclass
class Captured:
    """The graphs of one signature, which differ in their guards, and which of them each set of shapes needs."""

    graphs: list[BlockGraph] = field(default_factory=list)
    by_shapes: dict[tuple[torch.Size, ...], BlockGraph] = field(default_factory=dict)


class Variants:
    """Captures and remembers block graphs; `progress` is told about every capture."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or StatusLine()
        self._captured: dict[Hashable, Captured] = {}
        # texts, not errors: an error that is kept, or raised again, keeps the tensors of its frames alive
        self._failures: dict[Hashable, str] = {}
        self._count: dict[Hashable, int] = {}
        self._of_signature: dict[Hashable, list[BlockGraph]] = {}
        self._twins: dict[Hashable, int] = {}
        # graphs of blocks whose attributes change from call to call, so far without a change of the graph: one more
        # value may be the first that matters, so what such a graph rebuilds has to be compared in every frame
        self.unsettled: set[BlockGraph] = set()

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
        attributes: Attributes,
        call: Call,
        forward: Forward,
    ) -> BlockGraph:
        """The graph that this call of a block runs.

        Args:
            kind: equal for blocks that may share graphs.
            block: the block, captured if the graph is new.
            modules: the block and its submodules.
            state: its parameters and buffers.
            attributes: its plain attributes.
            call: the call's arguments.
            forward: the block's own forward.

        Raises:
            CaptureError: it cannot be captured.
        """
        signature = (kind, _signature(modules, state, call))
        restless = self._is_restless(signature)
        key = (signature, None if restless else attributes.now())
        captured = self._captured.get(key)
        if captured is None:
            known = self._of_signature.get(signature, []) if restless else []
            captured = self._captured[key] = Captured(list(known))
        shapes = tuple(tensor.shape for tensor in call.tensors)
        graph = captured.by_shapes.get(shapes)
        if graph is None:
            fitting = (graph for graph in captured.graphs if graph.capture.fits(call.tensors))
            graph = next(fitting, None) or self._capture(key, kind, block, call, forward)
            captured.by_shapes[shapes] = graph
        return graph

    def _capture(self, key: Key, kind: Hashable, block: nn.Module, call: Call, forward: Forward) -> BlockGraph:
        if key in self._failures:
            raise CaptureError(self._failures[key])
        if self._count.get(kind, 0) >= MOST_VARIANTS:
            raise CaptureError(f"more than {MOST_VARIANTS} different kinds of calls")
        self._progress.start(f"hilore: capturing the graph of {type(block).__name__}", 1)
        try:
            graph = block_graph(capture(block, call, forward))
        except CaptureError as error:
            self._failures[key] = error.message
            raise
        finally:
            self._progress.finish()
        self._count[kind] = self._count.get(kind, 0) + 1
        graph = self._twin_or_new(key[0], graph)
        self._captured[key].graphs.append(graph)
        return graph

    def _twin_or_new(self, signature: Hashable, graph: BlockGraph) -> BlockGraph:
        """The graph, or one that was captured under other attributes and computes the same."""
        known = self._of_signature.setdefault(signature, [])
        twin = next((other for other in known if same_graph(graph, other)), None)
        if twin is None:
            known.append(graph)
        else:
            self._twins[signature] = self._twins.get(signature, 0) + 1
        if self._is_restless(signature):
            self.unsettled.update(known)
        return twin or graph

    def _is_restless(self, signature: Hashable) -> bool:
        return self._twins.get(signature, 0) >= MOST_TWINS


def _signature(modules: tuple[nn.Module, ...], state: BlockState, call: Call) -> Hashable:
    tensors = call.tensors
    device_type = tensors[0].device.type if tensors else "cpu"
    parameters = tuple((tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in state.tensors())
    return call.structure_key(), tuple(map(tensor_key, tensors)), parameters, mode_key(modules, device_type)


def kind_of(block: nn.Module) -> Hashable:
    """What blocks that may share graphs have in common: classes and plain attributes, but not their position."""
    return tuple((name, type(module), plain_attributes(module)) for name, module in block.named_modules())


def same_graph(one: BlockGraph, other: BlockGraph) -> bool:
    """Whether two graphs run the same ops on the same numbers under the same guards."""
    first, second = one.capture, other.capture
    if first.module.code != second.module.code or first.guards != second.guards:
        return False
    return all(
        torch.equal(getattr(first.module, str(node.target)), getattr(second.module, str(node.target)))
        for node in first.module.graph.nodes
        if node.op == "get_attr"
    )
