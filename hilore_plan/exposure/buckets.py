"""Buckets of exposure: where to cut a distribution of exposures, and what each bucket then is to the planner.

The planner gives one solved entry to each bucket b and prices its risk at lambda times the bucket's mean-square
exposure m_b. Let V(p) be the least of time + p * risk over all plans, for a price p per unit of risk. As a minimum of
straight lines it is concave, so the step time that a set of buckets can reach,

    sum over b of share_b V(lambda m_b)  >=  mean over micro-batches of V(lambda e^2),        (Jensen)

falls as the cuts get finer, and the best cuts minimise the left side. Most units that can be compressed save similar
times at risks which lie decades apart: each step of log p drops about as many of them, V' falls like 1/p, and V grows
like log p. At small p everything is compressed and V is straight. Both together: V(p) ~ log(1 + p / p0), and the cuts
minimise

    sum over b of share_b log(1 + m_b / (0.01 m)),    m the mean square over all micro-batches,

for an exposure below a tenth of the RMS leaves nothing worth keeping exact. Quantiles, of counts or of contributions to
the sum of squares, would spend cuts inside a dense cluster of nearly equal exposures, where nothing is gained. The
minimum is found exactly, by dynamic programming over the sorted exposures.

No torch here: a profile carries exposures or statistics, and plans are made without it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hilore_plan.errors import UsageError

# in mean squares; see above
_FLAT_BELOW = 0.01
# Cuts fall between this many runs of equally many sorted exposures: the program is quadratic in their number.
_RUNS = 256


@dataclass(frozen=True)
class BucketStats:
    """One bucket: exposures above the bucket before and at most `edge`, which is None for the highest.

    `share` is its fraction of all micro-batches, `mean_square` the mean of the squared exposures in it.
    """

    edge: float | None
    share: float
    mean_square: float


@dataclass(frozen=True)
class _Run:
    """Neighbours in the sorted exposures that stay together."""

    top: float
    count: int
    squares: float


def bucket_edges(exposures: Sequence[float], count: int, separate_zero: bool) -> tuple[float, ...]:
    """The upper edges of all buckets but the highest, which has none: ascending, at most `count - 1`.

    There are fewer where there are fewer different exposures. An exposure equal to an edge belongs below it.

    Args:
        exposures: of micro-batches that stand for training, in any order and unit.
        count: buckets wanted, that of exposure zero included.
        separate_zero: exposure exactly zero is a bucket of its own (edge 0.0) if it occurs: allowed where zero
            coefficients mean no gradient, and then worth it, for compression is free there.

    Raises:
        UsageError: no exposures, one that is negative or not finite, or a count below 1.
    """
    ordered = _checked(exposures)
    if count < 1:
        raise UsageError(f"{count} exposure buckets make no sense", "give at least 1; the default is 4")
    zero = separate_zero and count > 1 and ordered[0] == 0 < ordered[-1]
    rest = [value for value in ordered if value > 0] if zero else ordered
    edges = _best_cuts(_runs(rest), count - zero)
    return (0.0, *edges) if zero else edges


def bucket_stats(exposures: Sequence[float], edges: Sequence[float]) -> tuple[BucketStats, ...]:
    """Share and mean square of each bucket; one more than there are edges.

    A bucket without exposures has the share 0 and the mean square of its upper edge (of its lower one, if highest).

    Raises:
        UsageError: no exposures, one that is negative or not finite, or edges that do not ascend.
    """
    ordered = _checked(exposures)
    if any(low >= high for low, high in pairwise(edges)):
        raise UsageError(f"bucket edges must ascend: {list(edges)}", "use those of `bucket_edges`")
    members: list[list[float]] = [[] for _ in range(len(edges) + 1)]
    for value in ordered:
        members[bucket_of(edges, value)].append(value * value)
    return tuple(
        BucketStats(
            edge=edges[index] if index < len(edges) else None,
            share=len(squares) / len(ordered),
            mean_square=math.fsum(squares) / len(squares) if squares else edges[min(index, len(edges) - 1)] ** 2,
        )
        for index, squares in enumerate(members)
    )


def bucket_of(edges: Sequence[float], exposure: float) -> int:
    """The bucket of an exposure: the first whose edge it does not exceed, else the highest, `len(edges)`."""
    return bisect_left(edges, exposure)


def _checked(exposures: Sequence[float]) -> list[float]:
    for index, value in enumerate(exposures):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"exposure {index} is {value}", "an exposure is a finite number, at least 0")
    if not exposures:
        raise UsageError("there are no exposures to make buckets from", "give the exposure of at least one micro-batch")
    return sorted(map(float, exposures))


def _runs(ordered: list[float]) -> list[_Run]:
    """The sorted exposures in at most `_RUNS` runs; equal ones are never parted."""
    rank: dict[float, int] = {}
    for index, value in enumerate(ordered):
        rank.setdefault(value, index * _RUNS // len(ordered))
    grouped = (list(run) for _, run in groupby(ordered, rank.__getitem__))
    return [_Run(run[-1], len(run), math.fsum(value * value for value in run)) for run in grouped]


def _best_cuts(runs: list[_Run], buckets: int) -> tuple[float, ...]:
    """The tops of all buckets but the last, for the least cost in at most `buckets` buckets."""
    costs = _Costs(runs)
    ends = range(1, len(runs) + 1)
    # best[end]: the least cost of the first `end` runs in the buckets so far, with the ends of those buckets
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *((costs.of(0, end), (end,)) for end in ends)]
    for _ in range(buckets - 1):
        best = [best[0], *(min(_extensions(best, costs, end), key=_cost_then_cuts) for end in ends)]
    return tuple(runs[end - 1].top for end in best[-1][1][:-1])


def _extensions(
    best: list[tuple[float, tuple[int, ...]]], costs: _Costs, end: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The first `end` runs in the buckets that they have, or with one more bucket that begins at any run."""
    more = [(best[start][0] + costs.of(start, end), (*best[start][1], end)) for start in range(1, end)]
    return [best[end], *more]


def _cost_then_cuts(option: tuple[float, tuple[int, ...]]) -> tuple[float, int]:
    return option[0], len(option[1])


class _Costs:
    """The cost of a bucket of neighbouring runs, from running sums."""

    def __init__(self, runs: list[_Run]) -> None:
        self._counts, self._squares = [0], [0.0]
        for run in runs:
            self._counts.append(self._counts[-1] + run.count)
            self._squares.append(self._squares[-1] + run.squares)
        self._floor = _FLAT_BELOW * self._squares[-1] / self._counts[-1]

    def of(self, start: int, end: int) -> float:
        """Of runs `start` to `end`, without the latter: how many exposures times log(1 + mean square / floor)."""
        count = self._counts[end] - self._counts[start]
        squares = self._squares[end] - self._squares[start]
        return count * math.log1p(squares / count / self._floor) if self._floor else 0.0
