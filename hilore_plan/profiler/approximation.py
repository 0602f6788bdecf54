"""What a block's backward sees when some of its units are kept in a codec: their slots, and what is rebuilt from them.

Every value that depends on a compressed one and is not compressed itself counts as rebuilt. So do the output and the
log-sum-exp of attention where q or k is compressed: kept exactly beside them, they would not belong together. Beside a
compressed v they count as kept. Plans keep them, for attention is dear to run again; and an output that was made of the
inexact v would hide half of the error, since backward subtracts the one from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hilore_plan.codecs.base import Codec, decode, encode
from hilore_plan.graph.attention import weighted
from hilore_plan.graph.capture import block_state
from hilore_plan.graph.program import Program, recovery_programs, unrecoverable
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.sizes import Geometry, Shapes
from hilore_plan.profiler.tape import Tape


class Approximation:
    """How the slots of one block graph follow from a set of approximate values.

    Args:
        graph: the graph of the block's forward.
        units: the values that are compressed.
    """

    def __init__(self, graph: BlockGraph, units: frozenset[int]) -> None:
        self.graph = graph
        self.units = units
        touched = following(graph, units) - units
        kept = {i for i, value in enumerate(graph.values) if value.keepable and i not in touched}
        while lost := unrecoverable(graph, kept) - kept:
            kept |= lost
        self.programs = [program for program in recovery_programs(graph, kept) if program is not None]
        read = {value for program in self.programs for value in program.sources}
        self.sources = sorted(v for v in read | units if graph.values[v].kind == "op")
        self.slots = [slot for unit in units for slot in graph.values[unit].slots]

    def replaced(self, block: nn.Module, tape: Tape, codecs: Mapping[int, Codec]) -> dict[int, torch.Tensor]:
        """The approximate slots by number, each unit having gone through its codec.

        Raises:
            CodecError: a codec refuses a unit.
        """
        assert tape.call is not None
        shapes = tuple(tensor.shape for tensor in tape.call.tensors)
        with torch.no_grad():
            values = self._exact_values(tape, shapes)
            for unit, codec in codecs.items():
                values[unit] = _in_layout_of(values[unit], decode(encode(codec, values[unit])))
            slots = self._geometries(self.slots, shapes, lambda slot: self.graph.slots[slot].node.meta["val"])
            owner = {slot: self.graph.slots[slot].value for slot in self.slots}
            found = {slot: values[owner[slot]].as_strided(*place) for slot, place in slots.items()}
            return {**found, **self._rebuilt(block, values, shapes)}

    def _exact_values(self, tape: Tape, shapes: Shapes) -> dict[int, torch.Tensor]:
        values = self.graph.values
        places = self._geometries(self.sources, shapes, lambda value: values[value].fake)
        found = {value: tape.slots[values[value].slots[0]].as_strided(*place) for value, place in places.items()}
        given = tape.call.tensors if tape.call else ()
        inputs = {i: given[v.place] for i, v in enumerate(values) if v.kind == "input" and v.place is not None}
        return {**inputs, **found}

    def _rebuilt(self, block: nn.Module, values: dict[int, torch.Tensor], shapes: Shapes) -> dict[int, torch.Tensor]:
        state = block_state(block)
        parameters = [state[name] for name in self.graph.capture.state_names]
        slots: dict[int, torch.Tensor] = {}
        for program in self.programs:
            results = program.run(*program.sizes(shapes), *_arguments(program, parameters, values))
            slots.update(zip(program.slots, results, strict=False))
            values.update(zip(program.carries, results[len(program.slots) :], strict=True))
        return slots

    def _geometries(
        self, keys: list[int], shapes: Shapes, fake_of: Callable[[int], torch.Tensor]
    ) -> dict[int, Geometry]:
        geometry = self.graph.sizes.geometry([fake_of(key) for key in keys])
        return dict(zip(keys, geometry(shapes), strict=True))


def following(graph: BlockGraph, values: frozenset[int]) -> set[int]:
    """The values themselves, and all that are computed from them, but for what attention makes of v."""
    found = set(values)
    for op in graph.ops:
        if not found.isdisjoint(set(op.inputs).difference(weighted(op, graph))):
            found.update(op.outputs)
    return found


def _arguments(program: Program, parameters: list[torch.Tensor], values: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    read = [values[value] for value in (*program.sources, *program.carried)]
    return [*(parameters[index] for index in program.state), *read]


def _in_layout_of(exact: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """The decoded tensor with the strides of the exact one, as the slots' views of it expect."""
    if decoded.stride() == exact.stride():
        return decoded
    layout = torch.empty_strided(exact.shape, exact.stride(), dtype=exact.dtype, device=exact.device)
    return layout.copy_(decoded)
