"""Cuts of an exposure distribution: against brute force, and what may never happen."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilore_plan.errors import UsageError
from hilore_plan.exposure.buckets import BucketStats, bucket_edges, bucket_of, bucket_stats

EXPOSURES = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40)


def cost(exposures: list[float], edges: tuple[float, ...]) -> float:
    """The module's criterion, from the statistics that the planner gets."""
    floor = 0.01 * math.fsum(value * value for value in exposures) / len(exposures)
    stats = bucket_stats(exposures, edges)
    return math.fsum(bucket.share * math.log1p(bucket.mean_square / floor) for bucket in stats if bucket.share)


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=9), st.integers(1, 4))
def test_no_other_cuts_cost_less(exposures: list[float], count: int) -> None:
    edges = bucket_edges(exposures, count, separate_zero=False)
    inner = sorted(set(exposures))[:-1]
    options = itertools.chain.from_iterable(itertools.combinations(inner, size) for size in range(count))
    assert cost(exposures, edges) == pytest.approx(min(cost(exposures, option) for option in options), rel=1e-12)


@given(EXPOSURES, st.integers(1, 6), st.booleans())
def test_edges_ascend_are_no_more_than_asked_and_every_bucket_is_used(
    exposures: list[float], count: int, separate_zero: bool
) -> None:
    edges = bucket_edges(exposures, count, separate_zero)
    stats = bucket_stats(exposures, edges)
    assert list(edges) == sorted(set(edges))
    assert len(edges) <= count - 1
    assert all(bucket.share > 0 for bucket in stats)
    assert math.fsum(bucket.share for bucket in stats) == pytest.approx(1)
    assert [bucket.edge for bucket in stats] == [*edges, None]
    mean_square = math.fsum(value * value for value in exposures) / len(exposures)
    assert math.fsum(bucket.share * bucket.mean_square for bucket in stats) == pytest.approx(mean_square)
    assert bucket_edges(exposures[::-1], count, separate_zero) == edges
    if separate_zero and count > 1 and 0.0 in exposures and max(exposures) > 0:
        assert stats[0] == BucketStats(0.0, exposures.count(0.0) / len(exposures), 0.0)


@given(EXPOSURES, st.floats(0.1, 10.0))
def test_the_unit_of_the_exposures_does_not_matter(exposures: list[float], unit: float) -> None:
    def shares(values: list[float]) -> list[float]:
        return [bucket.share for bucket in bucket_stats(values, bucket_edges(values, 4, True))]

    exact = 2.0 ** round(math.log2(unit))
    assert shares(exposures) == shares([value * exact for value in exposures])


def test_clusters_are_told_apart_wherever_their_weight_lies() -> None:
    exposures = [0.0] * 30 + [0.9, 1.0, 1.1] * 100 + [9.0, 10.0, 11.0]
    assert bucket_edges(exposures, 3, separate_zero=True) == (0.0, 1.1)
    assert bucket_edges(exposures, 2, separate_zero=True) == (0.0,)
    assert bucket_edges(exposures, 1, separate_zero=True) == ()


def test_without_leave_zero_is_like_any_other() -> None:
    assert bucket_edges([0.0, 0.001, 5.0, 6.0], 2, separate_zero=False) == (0.001,)


def test_one_exposure_is_one_bucket() -> None:
    for exposures in ([0.0] * 5, [2.0] * 5, [2.0]):
        assert bucket_edges(exposures, 4, separate_zero=True) == ()
    assert bucket_stats([2.0, 2.0], ()) == (BucketStats(None, 1.0, 4.0),)


def test_an_exposure_at_an_edge_belongs_below_it() -> None:
    edges = (0.0, 1.0)
    assert [bucket_of(edges, value) for value in (0.0, 1e-300, 1.0, 1.0000001, math.inf)] == [0, 1, 1, 2, 2]
    assert bucket_of((), 5.0) == 0


def test_an_unused_bucket_is_taken_at_its_edge() -> None:
    stats = bucket_stats([0.5], (1.0, 2.0))
    assert [(bucket.share, bucket.mean_square) for bucket in stats] == [(1.0, 0.25), (0.0, 4.0), (0.0, 4.0)]


def test_many_exposures_are_cut_as_well() -> None:
    exposures = [math.exp(math.sin(index)) for index in range(5000)]
    edges = bucket_edges(exposures, 4, separate_zero=True)
    assert len(edges) == 3
    assert min(bucket.share for bucket in bucket_stats(exposures, edges)) > 0.05


@pytest.mark.parametrize("exposures", [[], [1.0, math.nan], [math.inf], [-1.0]], ids=str)
def test_what_is_no_exposure_is_refused(exposures: list[float]) -> None:
    with pytest.raises(UsageError, match="exposure"):
        bucket_edges(exposures, 4, separate_zero=True)
    with pytest.raises(UsageError, match="exposure"):
        bucket_stats(exposures, ())


def test_counts_and_edges_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="0 exposure buckets"):
        bucket_edges([1.0], 0, separate_zero=True)
    with pytest.raises(UsageError, match="ascend"):
        bucket_stats([1.0], (2.0, 1.0))


def test_buckets_and_rollouts_load_without_torch() -> None:
    code = "import sys, hilore_plan.exposure.buckets, hilore_plan.exposure.rollouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
