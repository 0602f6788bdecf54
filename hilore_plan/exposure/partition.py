"""The search behind `regroup`: rows into micro-batches, at the least estimated time.

Row i has t_i tokens and the exposure e_i; micro-batch g has n_g rows, the longest of them of T_g tokens:

    minimise  sum over g of n_g T_g (1 + saving V(E_g^2 / m)),     n_g T_g <= limit
    V(x) = log(1 + x / 0.01) / log(1 + 1 / 0.01)

E_g^2 is the sum of e_i^2 over g (under the L1 norm, E_g the sum of e_i), m what E^2 is where a step's exposure is
spread evenly: V = 1 there. `saving` is the share of time that a plan wins between that and no exposure at all. The
first factor is the tokens with padding, which time is nearly proportional to. The second is what a plan makes of an
exposure: most units that can be compressed save similar times at risks which lie decades apart, so that the best of
time + price x risk falls like the logarithm of the price, and is straight near 0. V is concave: it pays to bring high
exposures together, to leave others with little, and most of all to have micro-batches with none.

Up to 8 rows the least is found by trying all ways. Beyond, the rows are put into a few orders (by length; or classes of
exposure apart, each by length) and each is cut into neighbours: into equal parts, or at its best places by dynamic
programming. Without exposures the first order cut at its best places is the optimum, and with any it keeps to a limit
that can be kept. Of few rows, the best of these is then improved by swaps of two.

No torch here: lists of a few hundred numbers are quicker without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import combinations, product
from operator import add
from typing import NamedTuple

Groups = list[list[int]]

_FLAT_BELOW = 0.01
_ALL_WAYS = 8
# Where classes of exposure end, as quantiles of the rows; at -1 end the rows without any.
_CUTS: tuple[tuple[float, ...], ...] = ((), (-1,), (0.5,), (-1, 0.5), (0.75,), (0.25, 0.5, 0.75))
# Beyond so many rows, the first two orders and no swaps: of 256 rows in 32 micro-batches the others win less than a
# thousandth, of 32 rows in 8 up to a hundredth.
_FEW = 64
# micro-batches of more rows than so many times the mean are tried only where nothing else keeps to the limit
_LARGE = 4
# a few microseconds each
_SWAPS = 4_000
# a swap must win more than roundings do, or two of them would undo each other for ever
_LEAST_GAIN = 1e-9


class Part(NamedTuple):
    """What the time of a micro-batch depends on; `droppable`: all of its rows are."""

    rows: int = 0
    longest: int = 0
    shortest: float = math.inf
    exposure: float = 0.0
    droppable: bool = True


@dataclass(frozen=True)
class Problem:
    """What to divide into `count` micro-batches of `size` rows each; None: of any number but 0.

    `exposures` are such that those of a micro-batch add up to E^2, or with `power=2` to E. A micro-batch whose rows are
    all in `droppable` costs what its shortest row does.
    """

    tokens: Sequence[int]
    exposures: Sequence[float]
    count: int
    size: int | None
    limit: int
    saving: float
    power: int = 1
    droppable: frozenset[int] = frozenset()

    def total(self, groups: Sequence[Sequence[int]]) -> float:
        """The estimated time of a step, in tokens; infinite if a micro-batch is beyond the limit."""
        return math.fsum(map(self.time, groups))

    def time(self, rows: Sequence[int]) -> float:
        """The estimated time of one micro-batch."""
        return self.estimate(self.part(rows))

    def part(self, rows: Iterable[int]) -> Part:
        """A micro-batch of these rows."""
        return reduce(self.with_row, rows, Part())

    def with_row(self, part: Part, row: int) -> Part:
        """A micro-batch with one more row."""
        tokens = self.tokens[row]
        return Part(
            part.rows + 1,
            max(part.longest, tokens),
            min(part.shortest, tokens),
            part.exposure + self.exposures[row],
            part.droppable and row in self.droppable,
        )

    def estimate(self, part: Part) -> float:
        """The estimated time of a micro-batch."""
        padded = part.shortest if part.droppable else part.rows * part.longest
        if padded > self.limit:
            return math.inf
        return padded * (1 + self.saving * self._felt(part.exposure)) if self.saving else padded

    def _felt(self, exposure: float) -> float:
        """V."""
        relative = (exposure / self._even) ** self.power if self._even > 0 else 0.0
        return math.log1p(relative / _FLAT_BELOW) / _FELT_AT_1

    @cached_property
    def _even(self) -> float:
        return math.fsum(self.exposures) / self.count


_FELT_AT_1 = math.log1p(1 / _FLAT_BELOW)


def best_groups(problem: Problem, rows: Sequence[int]) -> Groups | None:
    """The best micro-batches of these rows that are found; None if none keep to the limit.

    Rows are told apart by tokens and exposure, and only where these are equal by their number.
    """
    by_length = sorted(rows, key=lambda i: (problem.tokens[i], problem.exposures[i], i))
    if len(by_length) <= _ALL_WAYS:
        return _least_of_all(problem, by_length)
    ways = [groups for order in _orders(problem, by_length) if (groups := _cut(problem, order)) is not None]
    if not ways:
        return None
    best = min(ways, key=problem.total)
    return _swapped(problem, best) if problem.saving > 0 and len(by_length) <= _FEW else best


def _least_of_all(problem: Problem, rows: Sequence[int]) -> Groups | None:
    """The best of all ways: the first row's micro-batch is each that it may be, and the rest is divided likewise."""

    @cache
    def least(left: tuple[int, ...], count: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if count == 0 or not left:
            return (0.0 if count == 0 and not left else math.inf), ()
        best: tuple[float, tuple[tuple[int, ...], ...]] = (math.inf, ())
        for first in _with_first(left, problem.size):
            rest, groups = least(tuple(i for i in left if i not in first), count - 1)
            best = min(best, (problem.time(first) + rest, (first, *groups)), key=lambda way: way[0])
        return best

    time, groups = least(tuple(rows), problem.count)
    return [list(group) for group in groups] if time < math.inf else None


def _with_first(rows: tuple[int, ...], size: int | None) -> Iterator[tuple[int, ...]]:
    """Every choice of `size` rows with the first among them; of any number without a size."""
    for others in range(len(rows)) if size is None else (size - 1,):
        for chosen in combinations(rows[1:], others):
            yield (rows[0], *chosen)


def _orders(problem: Problem, by_length: Sequence[int]) -> Iterator[list[int]]:
    """Classes of exposure one after the other, each by length.

    Every second one is backwards, so that a micro-batch in which two classes meet has rows of like length.
    """
    exposures = sorted(problem.exposures[i] for i in by_length)
    matter = problem.saving > 0 and exposures[-1] > 0
    for cuts in _CUTS[: len(_CUTS) if matter and len(by_length) <= _FEW else 1 + matter]:
        edges = [0.0 if cut < 0 else exposures[int(cut * len(exposures))] for cut in cuts]
        order: list[int] = []
        for number, (low, high) in enumerate(zip([-1.0, *edges], [*edges, math.inf], strict=True)):
            members = [i for i in by_length if low < problem.exposures[i] <= high]
            order += members[::-1] if number % 2 else members
        yield order


def _cut(problem: Problem, order: Sequence[int]) -> Groups | None:
    """An order cut into neighbours in the best way that there is for it."""
    if problem.size is None:
        most = _LARGE * -(-len(order) // problem.count)
        return _cut_anywhere(problem, order, most) or _cut_anywhere(problem, order, len(order))
    groups = [list(order[start : start + problem.size]) for start in range(0, len(order), problem.size)]
    return groups if problem.total(groups) < math.inf else None


def _cut_anywhere(problem: Problem, order: Sequence[int], most: int) -> Groups | None:
    """By dynamic programming: `least[k][j]` is the least time of the first j rows in k micro-batches."""
    ends = range(1, len(order) + 1)
    lasts = [_times_of_last(problem, order[max(0, end - most) : end]) for end in ends]
    least = [[0.0] + [math.inf] * len(order)]
    for _ in range(problem.count):
        before = least[-1]
        least.append([math.inf, *(min(map(add, before[end - 1 :: -1], lasts[end - 1])) for end in ends)])
    return _traced(order, least, lasts) if least[-1][-1] < math.inf else None


def _times_of_last(problem: Problem, order: Sequence[int]) -> list[float]:
    """Times of the micro-batches that an order may end with: of one row, of two, up to what the limit allows."""
    times: list[float] = []
    part = Part()
    for i in reversed(order):
        part = problem.with_row(part, i)
        times.append(problem.estimate(part))
        if times[-1] == math.inf:
            break
    return times


def _traced(order: Sequence[int], least: Sequence[Sequence[float]], lasts: Sequence[Sequence[float]]) -> Groups:
    """The micro-batches that the program's last number stands for."""
    groups: Groups = []
    end = len(order)
    for before in least[-2::-1]:
        ways = list(map(add, before[end - 1 :: -1], lasts[end - 1]))
        size = 1 + ways.index(min(ways))
        groups.append(list(order[end - size : end]))
        end -= size
    return groups


def _swapped(problem: Problem, groups: Groups) -> Groups:
    """Rows of two micro-batches change places while that makes the step faster."""
    left, better = _SWAPS, True
    while better:
        better = False
        for one, other in combinations(groups, 2):
            left -= len(one) * len(other)
            if left < 0:
                return groups
            better = _swap_between(problem, one, other) or better
    return groups


def _swap_between(problem: Problem, one: list[int], other: list[int]) -> bool:
    """Makes the best swap of a row of `one` and a row of `other`, if any helps; whether one did."""
    rests = [problem.part(one[:a] + one[a + 1 :]) for a in range(len(one))]
    other_rests = [problem.part(other[:b] + other[b + 1 :]) for b in range(len(other))]
    best = (problem.time(one) + problem.time(other)) * (1 - _LEAST_GAIN)
    places: tuple[int, int] | None = None
    for a, b in product(range(len(one)), range(len(other))):
        swapped = problem.with_row(rests[a], other[b]), problem.with_row(other_rests[b], one[a])
        time = sum(map(problem.estimate, swapped))
        if time < best:
            best, places = time, (a, b)
    if places is not None:
        a, b = places
        one[a], other[b] = other[b], one[a]
    return places is not None
