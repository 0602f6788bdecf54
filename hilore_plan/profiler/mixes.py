"""Sets of compressed units in the whole model: the error that is predicted for them, and the measured one.

Every second set is random. The others are drawn as a planner draws: units where they are the least risky by their own
tests. If those tests are off, such sets are made of what is predicted too low.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from hilore_plan.profiler.batches import CalibrationBatch
from hilore_plan.profiler.calibrated import CalibratedClass, Pair
from hilore_plan.profiler.error import Gradients, Parts, Recorded, squared
from hilore_plan.profiler.sketch import Sketch
from hilore_plan.profiler.tape import Tape
from hilore_plan.schema.profile import margin

# relative errors that mixes aim at
LOWEST, HIGHEST = 0.004, 0.08
Chosen = Mapping[int, Sequence[Pair]]


@dataclass(frozen=True)
class Slope:
    """Squared error per squared gradient of a micro-batch that one pair causes in one block: see `error`.

    `spread` is its relative standard error.
    """

    local: float
    propagated: float
    spread: float = 0.0

    def damped(self, damping: float) -> float:
        """What it comes to in the model's gradient."""
        return self.local + damping * self.propagated

    def planned(self, damping: float) -> float:
        """What plans count with."""
        return self.damped(damping) * margin(self.spread)


@dataclass(frozen=True)
class Joint:
    """What one mix does to a step: `squares` of its micro-batches' gradients, squared gradient, squared error of it."""

    squares: float
    gradient: float
    error: float

    @property
    def relative(self) -> float:
        """The error relative to the gradient."""
        return math.sqrt(self.error / self.gradient)


Slopes = Mapping[tuple[int, Pair], Slope]
ClassOf = Sequence[CalibratedClass | None]


def draw_mixes(
    slopes: Slopes, class_of: ClassOf, scale: float, damping: float, count: int, seed: int, *, apart: bool = False
) -> list[Chosen]:
    """Mixes of pairs whose predicted errors are spread evenly, in logarithms, between the lowest and the highest.

    They are random and of the least risky by turns.

    Args:
        slopes: what a block and pair cause.
        class_of: the class of each block, which says what belongs into one mix.
        scale: the micro-batches' squared gradients over that of the step that they make up.
        damping: see `schema.profile.Risk`.
        count: how many mixes.
        seed: of the random choices.
        apart: whether units of one block are computed from each other in none of them, so that their errors add up to
            what their own tests say, and not to less.
    """
    choose = random.Random(seed)  # noqa: S311 - which units are tested together is no secret
    steps = [(number + 0.5) / count for number in range(count)]
    targets = [LOWEST * (HIGHEST / LOWEST) ** step for step in steps]
    mixes = []
    for number, target in enumerate(targets):
        order = _least_risky(slopes, damping, choose) if number % 2 else choose.sample(list(slopes), len(slopes))
        mixes.append(_filled(slopes, class_of, order, target**2 / scale, damping, apart=apart))
    return mixes


def _least_risky(slopes: Slopes, damping: float, choose: random.Random) -> list[tuple[int, Pair]]:
    """Pairs in random order, each in the third of the blocks where it errs least, the least first."""
    pairs = list(dict.fromkeys(pair for _, pair in slopes))
    choose.shuffle(pairs)
    order = []
    for pair in pairs:
        places = sorted((p for p in slopes if p[1] == pair), key=lambda place: slopes[place].planned(damping))
        order += places[: -(-len(places) // 3)]
    return order


def _filled(
    slopes: Slopes, class_of: ClassOf, order: Sequence[tuple[int, Pair]], target: float, damping: float, *, apart: bool
) -> Chosen:
    """The pairs of blocks in this order, as long as they leave the target in reach."""
    total = 0.0
    chosen: dict[int, list[Pair]] = {}
    for block, pair in order:
        more = slopes[block, pair].damped(damping)
        if total + more <= target and _joins(pair, chosen.get(block, ()), class_of[block], apart):
            total += more
            chosen.setdefault(block, []).append(pair)
    return chosen


def _joins(pair: Pair, others: Sequence[Pair], found: CalibratedClass | None, apart: bool) -> bool:
    units = [pair.unit, *(other.unit for other in others)]
    if len(set(units)) < len(units):
        return False
    return found is None or (found.add_up(units) and (found.apart(units) or not apart))


def predicted_squares(slopes: Slopes, chosen: Chosen, damping: float) -> float:
    """Squared error per squared gradient of a micro-batch that a mix causes."""
    return sum(slopes[block, pair].damped(damping) for block, pairs in chosen.items() for pair in pairs)


def fit_damping(slopes: Slopes, mixes: Sequence[Chosen], joints: Sequence[Joint]) -> float:
    """The one factor on what is propagated that predicts the joint errors best.

    The logarithms of predicted over measured squares sum up to zero; they grow with the factor, so it is bisected for.
    Where no mix causes any error there is nothing to fit, and errors are taken to go down undamped.
    """
    known = [(mix, joint) for mix, joint in zip(mixes, joints, strict=True) if mix and joint.error > 0]
    if not known:
        return 1.0

    def excess(damping: float) -> float:
        squares = ((predicted_squares(slopes, mix, damping) * joint.squares, joint.error) for mix, joint in known)
        return sum(math.log(max(predicted, 1e-300) / measured) for predicted, measured in squares)

    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2


class JointRuns:
    """Backward through the whole model with sets of units compressed.

    Args:
        model: within `in_fp32`.
        parts: its parameters and blocks.
        tapes: of the blocks, within `taped`.
        class_of: the class of each block; None where nothing is known of it.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        tapes: Sequence[Tape],
        class_of: ClassOf,
    ) -> None:
        self.model = model
        self.parts = parts
        self.tapes = tapes
        self.class_of = class_of

    def measure(
        self, batches: Sequence[CalibrationBatch], mixes: Sequence[Chosen], done: Callable[[], object]
    ) -> list[Joint]:
        """What each mix does to the step that `batches` make up together; calls `done` after every micro-batch."""
        count = len(self.parts.everything)
        exact, approximate = Sketch(count), [Sketch(count) for _ in mixes]
        squares = 0.0
        for batch in batches:
            recorded = Recorded(self.model, self.parts, self.tapes, batch)
            squares += _added(exact, recorded.whole())
            for mix, sketch in zip(mixes, approximate, strict=True):
                with self.compressed(mix):
                    sketch.add(recorded.whole())
            del recorded  # else its graph would be live beside the next one
            done()
        return [Joint(squares, exact.squared(), sketch.squared_distance(exact)) for sketch in approximate]

    @contextmanager
    def compressed(self, mix: Chosen) -> Iterator[None]:
        """Backward sees these units of the recorded forward in their codecs while the context lasts."""
        try:
            for block, pairs in mix.items():
                found = self.class_of[block]
                assert found is not None
                self.tapes[block].replaced = found.replaced(self.parts.blocks[block], self.tapes[block], pairs)
            yield
        finally:
            for tape in self.tapes:
                tape.replaced = {}


def _added(sketch: Sketch, gradient: Gradients) -> float:
    """Add a gradient to a sketch; returns its square."""
    sketch.add(gradient)
    return squared(gradient)
