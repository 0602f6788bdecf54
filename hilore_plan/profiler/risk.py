"""The tests of single blocks: which units and codecs are tried where, and what their errors come to.

A pair of unit and codec is tested in every block of its class, on every micro-batch. There are micro-batches on which
all pairs err far more than on others. Were each pair tested on some of them only, those that were spared these would
look best, and a plan is made of what looks best.

How much of what a block hands on arrives below is measured once for each branch of a block (attention, MLP, a norm: the
first part of its units' names), on one micro-batch, with the errors of all its pairs added up at equal lengths. It
depends on depth and branch and hardly on the codec: in SmolLM2-135M it is all of it in the first block, two thirds in
the next ten, half further up.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from hilore_plan.codecs.base import Codec
from hilore_plan.errors import CaptureError
from hilore_plan.profiler.calibrated import CalibratedClass, Pair, calibrated_class
from hilore_plan.profiler.classes import CapturedClass, FoundClass
from hilore_plan.profiler.error import Gradients, Recorded, differences, squared, squared_distance
from hilore_plan.profiler.formats import taken
from hilore_plan.profiler.mixes import Slope
from hilore_plan.profiler.sketch import Sketch
from hilore_plan.profiler.tape import Tape
from hilore_plan.schema.profile import UnitRisk


class CalibrationWarning(UserWarning):
    """Blocks whose risk cannot be told: plans compress nothing in them."""


@dataclass
class _Sums:
    """Squared errors of one block and pair, one for each micro-batch; `propagated` as if it went down undamped."""

    local: list[float] = field(default_factory=list)
    propagated: list[float] = field(default_factory=list)

    def slope(self, squares: Sequence[float], arriving: float) -> Slope:
        """What they come to, given the squared gradients of the micro-batches and the share that arrives below."""
        whole = sum(squares)
        local, propagated = sum(self.local), arriving * sum(self.propagated)
        errors = [near + arriving * far for near, far in zip(self.local, self.propagated, strict=True)]
        return Slope(local / whole, propagated / whole, _relative_standard_error(errors, squares))


class BlockTests:
    """Tests of all pairs in all blocks.

    Args:
        classes: the classes of the profile.
        codecs: what units are compressed with.
        micro_batches: how many there will be.
        narrow: whether the profile's graphs are not in fp32.
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
        self._squares: list[float] = []
        self._pairs: list[list[Pair]] | None = None
        self._sums: dict[tuple[int, Pair], _Sums] = {}
        self._arriving: dict[tuple[int, str], float] = {}

    @property
    def class_of(self) -> list[CalibratedClass | None]:
        """The class of each block; None where there is no graph."""
        return [self.classes[number] for number in self.owner]

    @property
    def slopes(self) -> dict[tuple[int, Pair], Slope]:
        """What each block and pair cause."""
        return {
            (block, pair): sums.slope(self._squares, self._arriving.get((block, pair.branch), 1.0))
            for (block, pair), sums in self._sums.items()
        }

    @property
    def squares(self) -> float:
        """The squared gradients of the micro-batches so far, added up."""
        return sum(self._squares)

    def pairs(self, recorded: Recorded) -> list[list[Pair]]:
        """The pairs of each class, found with the first forward that is recorded."""
        if self._pairs is None:
            self._pairs = [self._class_pairs(number, recorded) for number in range(len(self.classes))]
        return self._pairs

    def expected_seconds(self, recorded: Recorded) -> float:
        """What all tests will take: one pair of each class and codec is tried, a second time for the clock."""
        total = 0.0
        for number, pairs in enumerate(self.pairs(recorded)):
            for codec in self.codecs:
                alike = [pair for pair in pairs if pair.codec is codec]
                if alike:
                    seconds = self._seconds_of(recorded, self.members[number][0], alike[len(alike) // 2])
                    total += seconds * len(alike) * len(self.members[number]) * self.micro_batches
        return total

    def passes(self, recorded: Recorded) -> float:
        """How many backward passes through the model it takes to follow errors down: each half of one, on average."""
        branches = [len({pair.branch for pair in pairs}) for pairs in self.pairs(recorded)]
        return sum(branches[owner] for owner in self.owner) / 2

    def _seconds_of(self, recorded: Recorded, block: int, pair: Pair) -> float:
        self._compressed(recorded, block, recorded.tapes[block], pair)
        started = time.perf_counter()
        self._compressed(recorded, block, recorded.tapes[block], pair)
        return time.perf_counter() - started

    def run(self, recorded: Recorded, number: int, step: Sketch) -> None:
        """The tests of micro-batch `number`, block by block from the lowest; its gradient is added to `step`."""
        # `below` is the squared gradient of everything below the block
        start, below, whole = 0, 0.0, squared(recorded.outside)
        for block in range(len(self.owner)):
            parameters, inputs = recorded.block(block)
            if block == 0:
                below = squared(recorded.below(0, inputs))
            self._test(recorded, block, (parameters, inputs), below, number)
            step.add(parameters, start)
            start += len(parameters)
            size = squared(parameters)
            below, whole = below + size, whole + size
        step.add(recorded.outside, start)
        self._squares.append(whole)

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
                    spread=tuple(slopes[block, pair].spread for block in members),
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

    def _test(
        self, recorded: Recorded, block: int, exact: tuple[Gradients, Gradients], below: float, number: int
    ) -> None:
        parameters, inputs = exact
        pairs, size = self.pairs(recorded)[self.owner[block]], squared(inputs)
        due = self._due(pairs, block, number) if size and below else set()
        handed: dict[str, Gradients] = {}
        for pair in pairs:
            approximate, handed_on = self._compressed(recorded, block, recorded.tapes[block], pair)
            error = list(differences(handed_on, inputs))
            square = squared(error)
            sums = self._sums.setdefault((block, pair), _Sums())
            sums.local.append(squared_distance(approximate, parameters))
            sums.propagated.append(square / size * below if size else 0.0)
            if square and pair.branch in due:
                handed[pair.branch] = _added(handed.get(pair.branch), error, 1 / math.sqrt(square))
        for branch, error in handed.items():
            undamped = squared(error) / size * below
            self._arriving[block, branch] = squared(recorded.below(block, error)) / undamped

    def _due(self, pairs: Sequence[Pair], block: int, number: int) -> set[str]:
        """The branches whose errors are followed down from this block on micro-batch `number`."""
        branches = dict.fromkeys(pair.branch for pair in pairs)
        return {name for place, name in enumerate(branches) if (number - block - place) % self.micro_batches == 0}

    def _compressed(self, recorded: Recorded, block: int, tape: Tape, pair: Pair) -> tuple[Gradients, Gradients]:
        found = self.classes[self.owner[block]]
        assert found is not None
        tape.replaced = found.replaced(recorded.parts.blocks[block], tape, [pair])
        try:
            return recorded.block(block)
        finally:
            tape.replaced = {}


def _added(total: Gradients | None, error: Gradients, scale: float) -> Gradients:
    scaled = [None if part is None else scale * part for part in error]
    if total is None:
        return scaled
    return [old if new is None else new if old is None else old + new for old, new in zip(total, scaled, strict=True)]


def _relative_standard_error(errors: Sequence[float], squares: Sequence[float]) -> float:
    """Of the ratio of two sums over micro-batches: sqrt(n / (n - 1) sum (e_m - r g_m)^2) / sum e_m, r being the ratio.

    Cochran, Sampling Techniques, 3rd edition, 6.4, without the correction for finite populations.
    """
    count, total = len(errors), sum(errors)
    if count < 2 or not total:
        return 0.0
    ratio = total / sum(squares)
    scatter = sum((error - ratio * square) ** 2 for error, square in zip(errors, squares, strict=True))
    return math.sqrt(count / (count - 1) * scatter) / total
