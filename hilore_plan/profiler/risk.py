"""The tests of single blocks: which units and codecs are tried where, and what their errors come to.

A pair of unit and codec is tested in every block of its class, on `PASSES` micro-batches each. Which ones they are goes
round with block and pair, so that every micro-batch has its share of the work and of the say.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from hilore_plan.codecs.base import Codec
from hilore_plan.errors import CaptureError
from hilore_plan.profiler.calibrated import CalibratedClass, Pair, calibrated_class
from hilore_plan.profiler.classes import CapturedClass, FoundClass
from hilore_plan.profiler.error import Gradients, Recorded, squared, squared_distance
from hilore_plan.profiler.formats import taken
from hilore_plan.profiler.mixes import Slope
from hilore_plan.profiler.sketch import Sketch
from hilore_plan.profiler.tape import Tape
from hilore_plan.schema.profile import UnitRisk

PASSES = 4


class CalibrationWarning(UserWarning):
    """Blocks whose risk cannot be told: plans compress nothing in them."""


@dataclass
class _Sums:
    """Of one block and pair, over the micro-batches that it was tested on; `squares` are of their gradients."""

    local: float = 0.0
    propagated: float = 0.0
    squares: float = 0.0


class BlockTests:
    """Tests of all pairs in all blocks.

    Args:
        classes: the classes of the profile.
        codecs: what units are compressed with.
        micro_batches: how many there will be.
        narrow: whether the profile's graphs are not in fp32.

    Attributes:
        squares: the squared gradients of the micro-batches so far, added up.
    """

    def __init__(
        self, classes: Sequence[FoundClass], codecs: Sequence[Codec], micro_batches: int, *, narrow: bool = False
    ) -> None:
        self.classes = [calibrated_class(c, narrow) if isinstance(c, CapturedClass) else None for c in classes]
        self.members = [c.record.blocks for c in classes]
        owners = {block: number for number, members in enumerate(self.members) for block in members}
        self.owner = [owners[block] for block in sorted(owners)]
        self.codecs = codecs
        self.micro_batches = micro_batches
        self.squares = 0.0
        self._pairs: list[list[Pair]] | None = None
        self._sums: dict[tuple[int, Pair], _Sums] = {}

    @property
    def class_of(self) -> list[CalibratedClass | None]:
        """The class of each block; None where there is no graph."""
        return [self.classes[number] for number in self.owner]

    @property
    def slopes(self) -> dict[tuple[int, Pair], Slope]:
        """What each block and pair cause."""
        return {k: Slope(s.local / s.squares, s.propagated / s.squares) for k, s in self._sums.items()}

    def pairs(self, recorded: Recorded) -> list[list[Pair]]:
        """The pairs of each class, found with the first forward that is recorded."""
        if self._pairs is None:
            self._pairs = [self._class_pairs(number, recorded) for number in range(len(self.classes))]
        return self._pairs

    def expected_seconds(self, recorded: Recorded) -> float:
        """What all tests will take: one pair of each class and codec is tried, a second time for the clock."""
        passes = min(PASSES, self.micro_batches)
        total = 0.0
        for number, pairs in enumerate(self.pairs(recorded)):
            for codec in self.codecs:
                alike = [pair for pair in pairs if pair.codec is codec]
                if alike:
                    seconds = self._seconds_of(recorded, self.members[number][0], alike[len(alike) // 2])
                    total += seconds * len(alike) * len(self.members[number]) * passes
        return total

    def _seconds_of(self, recorded: Recorded, block: int, pair: Pair) -> float:
        self._compressed(recorded, block, recorded.tapes[block], pair)
        started = time.perf_counter()
        self._compressed(recorded, block, recorded.tapes[block], pair)
        return time.perf_counter() - started

    def run(self, recorded: Recorded, number: int, step: Sketch) -> None:
        """The tests of micro-batch `number`, block by block from the lowest; its gradient is added to `step`."""
        # `below` is the squared gradient of everything below the block, `whole` of all parameters
        start, below, whole = 0, 0.0, squared(recorded.outside)
        tested: list[_Sums] = []
        for block in range(len(self.owner)):
            parameters, inputs = recorded.block(block)
            if block == 0:
                below = recorded.beneath(inputs)
            tested += self._test(recorded, block, self._due(recorded, block, number), (parameters, inputs), below)
            step.add(parameters, start)
            start += len(parameters)
            size = squared(parameters)
            below, whole = below + size, whole + size
        step.add(recorded.outside, start)
        self.squares += whole
        for sums in tested:
            sums.squares += whole

    def unit_risks(self, scale: float) -> tuple[tuple[UnitRisk, ...], ...]:
        """The record for each class; `scale` makes squared errors per squared gradient those of a step."""
        slopes = self.slopes
        return tuple(
            tuple(
                UnitRisk(
                    unit=pair.unit,
                    codec=pair.codec.name,
                    local=tuple(slopes[block, pair].local * scale for block in members),
                    propagated=tuple(slopes[block, pair].propagated * scale for block in members),
                )
                for pair in pairs
            )
            for members, pairs in zip(self.members, self._pairs or [[] for _ in self.members], strict=True)
        )

    def _class_pairs(self, number: int, recorded: Recorded) -> list[Pair]:
        found, first = self.classes[number], self.members[number][0]
        if found is None:
            return []
        record = found.found.record
        try:
            units = set(found.units(found.graph_of(recorded.parts.blocks[first], recorded.tapes[first])))
        except CaptureError as error:
            warnings.warn(f"no risk of {record.name}: in fp32, {error.message}", CalibrationWarning, stacklevel=2)
            return []
        pairs = [(record.values[u].name, c) for c in self.codecs for u in taken(found.found.graph, record, c)]
        return [Pair(unit, codec) for unit, codec in pairs if unit in units]

    def _due(self, recorded: Recorded, block: int, number: int) -> list[Pair]:
        pairs = self.pairs(recorded)[self.owner[block]]
        count = self.micro_batches
        return [pair for place, pair in enumerate(pairs) if (number - block - place) % count < PASSES]

    def _test(
        self,
        recorded: Recorded,
        block: int,
        pairs: list[Pair],
        exact: tuple[Gradients, Gradients],
        below: float,
    ) -> list[_Sums]:
        """Tests pairs in a block; returns their sums, to which the micro-batch's squared gradient is still to come."""
        parameters, inputs = exact
        size = squared(inputs)
        tested = []
        for pair in pairs:
            approximate, handed_on = self._compressed(recorded, block, recorded.tapes[block], pair)
            sums = self._sums.setdefault((block, pair), _Sums())
            sums.local += squared_distance(approximate, parameters)
            sums.propagated += squared_distance(handed_on, inputs) / size * below if size else 0.0
            tested.append(sums)
        return tested

    def _compressed(self, recorded: Recorded, block: int, tape: Tape, pair: Pair) -> tuple[Gradients, Gradients]:
        found = self.classes[self.owner[block]]
        assert found is not None
        tape.replaced = found.replaced(recorded.parts.blocks[block], tape, [pair])
        try:
            return recorded.block(block)
        finally:
            tape.replaced = {}
