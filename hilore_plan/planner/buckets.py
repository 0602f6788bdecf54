"""Buckets: at which sizes and exposures of micro-batches a plan has entries of its own.

Sizes are cut evenly. Exposures are cut so that the plans of the buckets can do the most: let V(p) be the least seconds
plus p times risk over all plans, at a price p per unit of risk. Bucket b, with the mean m_b of its squared exposures,
pays lambda m_b. V is concave, being a minimum of straight lines, so

    sum over b of share_b V(lambda m_b)  >=  mean over micro-batches of V(lambda e^2)

(Jensen), and the best cuts make the left side least. Most units that can be compressed save similar times at risks that
lie decades apart, so that each step of log p drops about as many of them: V(p) grows like log p, and straight at first,
where all is compressed. Hence the cuts minimise

    sum over b of share_b log(1 + m_b / (0.01 m)),    m the mean of all squared exposures,

for below a tenth of the root mean square an exposure leaves nothing worth keeping exact. Quantiles would spend cuts
inside a dense cluster of nearly equal exposures, where nothing is gained. The least is found by dynamic programming
over the sorted exposures.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hilore_plan.errors import UsageError

FLAT_BELOW = 0.01  # in mean squares, see above
RUNS = 128  # cuts fall between so many runs of sorted exposures: the program is quadratic in their number


@dataclass(frozen=True)
class Bucket:
    """Exposures above the bucket before and at most `edge`; None is the highest bucket's.

    `frequency` is its part of all micro-batches, `weight` its part of all squared exposure.
    """

    edge: float | None
    frequency: float = 1.0
    weight: float = 1.0


def token_edges(largest: int, count: int) -> tuple[int, ...]:
    """The upper edges of `count` equal buckets up to `largest` tokens, ascending; fewer if there are fewer tokens.

    Raises:
        UsageError: if `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"{count} token buckets make no sense", hint="give at least 1; the default is 4")
    return tuple(sorted({-(-largest * edge // count) for edge in range(1, count + 1)}))


def exposure_edges(exposures: Sequence[float], count: int, *, separate_zero: bool) -> tuple[float, ...]:
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
    check_count(count)
    ordered = _checked(exposures)
    zero = separate_zero and count > 1 and ordered[0] == 0 < ordered[-1]
    rest = [value for value in ordered if value > 0] if zero else ordered
    edges = _best_cuts(_runs(rest), count - zero)
    return (0.0, *edges) if zero else edges


def exposure_buckets(exposures: Sequence[float], count: int, *, separate_zero: bool) -> tuple[Bucket, ...]:
    """The buckets between the edges of `exposure_edges`, ascending.

    Raises:
        UsageError: as `exposure_edges` does.
    """
    edges = exposure_edges(exposures, count, separate_zero=separate_zero)
    members: list[list[float]] = [[] for _ in range(len(edges) + 1)]
    for value in sorted(exposures):
        members[bucket_of(edges, value)].append(value * value)
    squares = [math.fsum(bucket) for bucket in members]
    whole = math.fsum(squares)
    return tuple(
        # without any exposure at all nothing is known of the one that will come: it weighs in full
        Bucket(edge, len(bucket) / len(exposures), square / whole if whole else 1.0)
        for edge, bucket, square in zip((*edges, None), members, squares, strict=True)
    )


def bucket_of(edges: Sequence[float], exposure: float) -> int:
    """The bucket of an exposure: the first whose edge it does not exceed, else the highest, `len(edges)`."""
    return bisect_left(edges, exposure)


def check_count(count: int) -> None:
    """Refuse a number of exposure buckets that makes no sense.

    Raises:
        UsageError: if it is below 1.
    """
    if count < 1:
        raise UsageError(f"{count} exposure buckets make no sense", hint="give at least 1; the default is 4")


def _checked(exposures: Sequence[float]) -> list[float]:
    for number, value in enumerate(exposures):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"exposure {number} is {value}", hint="an exposure is a finite number, at least 0")
    if not exposures:
        raise UsageError("there are no exposures to make buckets from", hint="give that of one micro-batch at least")
    return sorted(exposures)


def _runs(ordered: Sequence[float]) -> list[list[float]]:
    """The sorted exposures in at most `RUNS` runs; equal ones are never parted."""
    runs: dict[int, list[float]] = {}
    rank: dict[float, int] = {}
    for number, value in enumerate(ordered):
        runs.setdefault(rank.setdefault(value, number * RUNS // len(ordered)), []).append(value)
    return list(runs.values())


def _best_cuts(runs: Sequence[Sequence[float]], buckets: int) -> tuple[float, ...]:
    """The tops of all buckets but the last, where the buckets (at most so many) cost least."""
    counts = [0, *accumulate(len(run) for run in runs)]
    squares = [0.0, *accumulate(math.fsum(value * value for value in run) for run in runs)]
    floor = FLAT_BELOW * squares[-1] / counts[-1]

    def cost(start: int, end: int) -> float:
        count = counts[end] - counts[start]
        return count * math.log1p((squares[end] - squares[start]) / count / floor) if floor else 0.0

    # best[end]: the least cost of the first `end` runs in the buckets so far, and where those buckets end
    best = [(0.0, ()), *((cost(0, end), (end,)) for end in range(1, len(runs) + 1))]
    for _ in range(buckets - 1):
        more = [
            min([best[end], *((best[k][0] + cost(k, end), (*best[k][1], end)) for k in range(1, end))], key=_worth)
            for end in range(1, len(runs) + 1)
        ]
        best = [best[0], *more]
    return tuple(runs[end - 1][-1] for end in best[-1][1][:-1])


def _worth(option: tuple[float, tuple[int, ...]]) -> tuple[float, int]:
    return option[0], len(option[1])
