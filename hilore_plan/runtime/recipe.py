"""What to do with each slot of a block graph under a plan's actions, worked out once and used by every frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch

from hilore_plan.codecs import registry
from hilore_plan.codecs.base import Codec
from hilore_plan.graph.program import Program, recovery_programs, unrecoverable
from hilore_plan.graph.randomness import is_left_over
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.sizes import Geometry, Number, Shapes
from hilore_plan.schema.plan import Action, codec_of

# shapes whose sizes are remembered per recipe; lengths seldom take more values between two optimizer steps
REMEMBERED_SHAPES = 256


class Treatment(IntEnum):
    """What becomes of one slot."""

    KEEP = 0
    NARROW = 1
    COMPRESS = 2
    REBUILD = 3


class SlotRule(NamedTuple):
    """One slot's treatment, prepared: its value and stage, whether a program reads the value from here, its dtypes."""

    treatment: Treatment
    value: int
    stage: int
    provides: bool
    dtype: torch.dtype
    narrow: torch.dtype | None


@dataclass(frozen=True)
class Layout:
    """The concrete sizes of one recipe for one set of input shapes.

    `slots` has the geometry of every slot, `values` that of every value that is kept whole or narrow, `sizes` the
    numbers that each stage's program reads.
    """

    slots: tuple[Geometry, ...]
    values: dict[int, Geometry]
    sizes: tuple[tuple[Number, ...], ...]


class Recipe:
    """A block graph under one set of actions.

    Args:
        graph: the block graph.
        actions: action by unit name; units that are not named are recomputed, inputs that are not named are there.
        forced: values to store whatever the actions say.
        careful: whether everything that is compressed must be able to come back exactly, too.
    """

    def __init__(
        self,
        graph: BlockGraph,
        actions: Mapping[str, Action],
        forced: frozenset[int] = frozenset(),
        *,
        careful: bool = False,
    ) -> None:
        self.graph = graph
        self.actions = actions
        self.forced = forced
        self.refused: dict[int, str] = {}
        self.codecs = {i: codec for i in range(len(graph.values)) if (codec := self._codec(i))}
        self.exact: Recipe | None = self._exactly() if careful and self.codecs else None
        bound = self._bound_to_stay()
        self.narrowed = {i for i, value in enumerate(graph.values) if value.narrow and self._is("cast", i)} - forced
        kept = {i for i in range(len(graph.values)) if self._is_kept(i)} | forced | self.narrowed | bound
        kept |= self.codecs.keys()
        while lost := unrecoverable(graph, kept) - kept:
            kept |= lost
        self.kept: frozenset[int] = frozenset(kept)
        self.programs: tuple[Program | None, ...] = recovery_programs(graph, self.kept)
        self.rules = tuple(self._rule(slot) for slot in range(len(graph.slots)))
        fakes = [slot.node.meta["val"] for slot in graph.slots]
        self.kinds = tuple((fake.dtype, fake.device) for fake in fakes)
        self._layouts: dict[tuple[torch.Size, ...], Layout] = {}

    def _codec(self, index: int) -> Codec | None:
        """The codec of a value that is to be compressed; what it refuses is stored."""
        value = self.graph.values[index]
        name = codec_of(self.actions.get(value.name, ""))
        if name is None or value.kind != "op" or not value.slots or index in self.forced:
            return None
        codec = registry.find(name)
        reason = codec.refuses(torch.empty(0, dtype=value.fake.dtype, device=value.fake.device))
        if reason is not None:
            self.refused[index] = reason
            return None
        return codec

    def _exactly(self) -> Recipe:
        """This recipe with everything compressed recomputed instead."""
        compressed = {self.graph.values[index].name for index in self.codecs}
        actions = {name: "recompute" if name in compressed else action for name, action in self.actions.items()}
        return Recipe(self.graph, actions, self.forced | self.refused.keys())

    def _bound_to_stay(self) -> frozenset[int]:
        """What the way out needs to have been kept; what it cannot do without is not compressed."""
        if self.exact is None:
            return frozenset()
        for stuck in self.codecs.keys() & self.exact.kept:
            self.refused[stuck] = "nothing could rebuild it exactly"
            del self.codecs[stuck]
        return self.exact.kept

    def _is_kept(self, index: int) -> bool:
        value = self.graph.values[index]
        if index in self.refused or (value.slots and is_left_over(value.node)):
            return True
        if value.kind == "input":
            return bool(value.slots) or not self._is("recompute", index)
        return value.kind == "op" and bool(value.slots) and self._is("store", index)

    def _is(self, action: Action, index: int) -> bool:
        return self.actions.get(self.graph.values[index].name) == action

    def _rule(self, index: int) -> SlotRule:
        slot = self.graph.slots[index]
        value = self.graph.values[slot.value]
        provides = self.provider.get(slot.value) == index
        dtype = slot.node.meta["val"].dtype
        return SlotRule(self._treatment(slot.value), slot.value, slot.stage, provides, dtype, value.narrow)

    def _treatment(self, value: int) -> Treatment:
        if value in self.narrowed:
            return Treatment.NARROW
        if value in self.codecs:
            return Treatment.COMPRESS
        free = self.graph.values[value].kind != "op"
        return Treatment.KEEP if free or value in self.kept else Treatment.REBUILD

    @cached_property
    def provider(self) -> dict[int, int]:
        """For each value that is kept whole and that a program reads: the first slot that is a view of it."""
        return {
            value: self.graph.values[value].slots[0]
            for value in self._read
            if self.graph.values[value].kind == "op" and value not in self.narrowed and value not in self.codecs
        }

    @cached_property
    def _read(self) -> set[int]:
        """What the programs read, those of the way out included."""
        programs = self.programs if self.exact is None else (*self.programs, *self.exact.programs)
        return {value for program in programs if program for value in program.sources}

    @cached_property
    def read_inputs(self) -> dict[int, int]:
        """For each argument that a program reads: its place among the call's tensors."""
        return {value: place for value in self._read if (place := self.graph.values[value].place) is not None}

    def layout(self, shapes: tuple[torch.Size, ...]) -> Layout:
        """The concrete sizes for a call's tensors of these shapes."""
        layout = self._layouts.get(shapes)
        if layout is None:
            if len(self._layouts) >= REMEMBERED_SHAPES:
                self._layouts.clear()
            layout = self._layouts[shapes] = self._compute_layout(shapes)
        return layout

    def _compute_layout(self, shapes: Shapes) -> Layout:
        slots = self._slot_geometry(shapes)
        values = dict(zip(self._whole, self._value_geometry(shapes), strict=True))
        sizes = tuple(program.sizes(shapes) if program else () for program in self.programs)
        return Layout(slots, values, sizes)

    @cached_property
    def _whole(self) -> list[int]:
        return [*self.provider, *self.read_inputs, *self.narrowed, *self.codecs]

    @cached_property
    def _slot_geometry(self) -> Callable[[Shapes], tuple[Geometry, ...]]:
        fakes: list[torch.Tensor] = [slot.node.meta["val"] for slot in self.graph.slots]
        return self.graph.sizes.geometry(fakes)

    @cached_property
    def _value_geometry(self) -> Callable[[Shapes], tuple[Geometry, ...]]:
        return self.graph.sizes.geometry([self.graph.values[value].fake for value in self._whole])
