"""The classes of a profile as calibration sees them: their graphs in fp32, and which value there is which unit."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hilore_plan.codecs.base import Codec
from hilore_plan.graph.attention import scored, weighted
from hilore_plan.graph.capture import capture
from hilore_plan.graph.names import op_label
from hilore_plan.graph.recovery_units import BlockGraph, GraphOp, block_graph
from hilore_plan.profiler.approximation import Approximation, following
from hilore_plan.profiler.classes import CapturedClass
from hilore_plan.profiler.tape import Tape

_CASTS = ("upcast", "downcast", "cast", "copy")


@dataclass(frozen=True)
class Pair:
    """A unit of a class, by its name in the profile, and a codec that takes it."""

    unit: str
    codec: Codec

    @property
    def branch(self) -> str:
        """The part of the block that the unit is in: the first part of its name."""
        return self.unit.partition(".")[0]


@dataclass
class CalibratedClass:
    """A class whose units are tested in fp32.

    `found` is the class as profiled, in the dtype of the workload.
    """

    found: CapturedClass
    graphs: list[BlockGraph] = field(default_factory=list)
    _made: dict[tuple[int, frozenset[int]], Approximation] = field(default_factory=dict)

    def replaced(self, block: nn.Module, tape: Tape, pairs: Sequence[Pair]) -> dict[int, torch.Tensor]:
        """The slots of a recorded forward as they are with these units compressed."""
        assert tape.call is not None
        graph = self.graph_of(block, tape)
        places = self._places(graph)
        codecs = {places[pair.unit]: pair.codec for pair in pairs}
        key = (id(graph), frozenset(codecs))
        if key not in self._made:
            self._made[key] = Approximation(graph, key[1])
        return self._made[key].replaced(block, tape, codecs)

    def graph_of(self, block: nn.Module, tape: Tape) -> BlockGraph:
        """The graph in fp32 of a recorded forward, captured where none fits.

        Raises:
            CaptureError: it cannot be captured in fp32.
        """
        assert tape.call is not None
        for graph in self.graphs:
            if graph.capture.fits(tape.call.tensors):
                return graph
        self.graphs.append(block_graph(capture(block, tape.call, tape.forward)))
        return self.graphs[-1]

    def units(self, graph: BlockGraph) -> list[str]:
        """The units of the profile that `graph` has as well, and whose error can be told."""
        return list(self._places(graph))

    def add_up(self, units: Sequence[str]) -> bool:
        """Whether the errors of these units together are what their own tests add up to.

        Not so of a v beside an inexact q or k: attention is then rebuilt as a whole, and v errs less than was tested.
        """
        graph = self.found.graph
        reached = [following(graph, frozenset({graph.index[unit]})) for unit in units]
        for op in graph.ops:
            scores = [not found.isdisjoint(scored(op, graph)) for found in reached]
            values = [not found.isdisjoint(weighted(op, graph)) for found in reached]
            if any(scores) and any(v and not s for v, s in zip(values, scores, strict=True)):
                return False
        return True

    def apart(self, units: Sequence[str]) -> bool:
        """Whether none of these units is computed from another.

        Alone, the first is tested with all that follows from it rebuilt; beside another one, what follows from both is
        rebuilt from that. They err less than their own tests add up to.
        """
        graph = self.found.graph
        places = {graph.index[unit] for unit in units}
        return all(places & following(graph, frozenset({place})) == {place} for place in places)

    def _places(self, graph: BlockGraph) -> dict[str, int]:
        found = self.found.graph
        named = {key: place for place, key in enumerate(_keys(graph)) if key}
        aligned = len(graph.slots) == len(found.slots)
        places = {}
        for value, written, key in zip(found.values, self.found.record.values, _keys(found), strict=True):
            if not (written.keepable and written.kind == "op"):
                continue
            place = graph.slots[value.slots[0]].value if aligned else named.get(key or ())
            if place is not None and graph.values[place].kind == "op":
                places[value.name] = place
        return places


def calibrated_class(found: CapturedClass, narrow: bool) -> CalibratedClass:
    """The class for calibration; a graph that is in fp32 already is taken as it is."""
    return CalibratedClass(found, [] if narrow else [found.graph])


def _keys(graph: BlockGraph) -> list[tuple[object, ...] | None]:
    """What a value is called in both dtypes: as its name, but casts up, down and to the same dtype are alike."""
    keys: list[tuple[object, ...] | None] = [None] * len(graph.values)
    seen: Counter[tuple[str, str]] = Counter()
    for op in graph.ops:
        stem = _stem(op)
        seen[stem] += 1
        for value in op.outputs:
            node = graph.values[value].node
            output = node.args[1] if node.target is operator.getitem else 0
            keys[value] = keys[value] or (*stem, seen[stem], output)
    return keys


def _stem(op: GraphOp) -> tuple[str, str]:
    label = op_label(op.node)
    return op.node.meta.get("path", ""), "cast" if label in _CASTS else label
