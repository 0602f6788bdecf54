"""Where exposures are cut, and what each bucket then weighs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilore_plan.errors import UsageError
from hilore_plan.planner.buckets import FLAT_BELOW, Bucket, bucket_of, exposure_buckets, exposure_edges

EXPOSURES = st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0, 1.1, 2.0, 7.0]), min_size=1, max_size=9)


def cost(exposures: Sequence[float], edges: Sequence[float]) -> float:
    """The sum that the cuts make least, for all exposures of the list."""
    floor = FLAT_BELOW * sum(e * e for e in exposures) / len(exposures)
    members: dict[int, list[float]] = {}
    for value in exposures:
        members.setdefault(bucket_of(edges, value), []).append(value * value)
    return sum(len(m) * math.log1p(sum(m) / len(m) / floor) for m in members.values()) if floor else 0.0


@given(EXPOSURES, st.integers(1, 4))
def test_the_cuts_are_the_best_there_are(exposures: list[float], count: int) -> None:
    edges = exposure_edges(exposures, count, separate_zero=False)
    assert list(edges) == sorted(set(edges))
    assert len(edges) < count
    places = sorted(set(exposures))[:-1]
    options = itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(count))
    assert cost(exposures, edges) == pytest.approx(min(cost(exposures, option) for option in options))


@given(EXPOSURES, st.integers(1, 4), st.booleans())
def test_buckets_add_up(exposures: list[float], count: int, zero: bool) -> None:
    buckets = exposure_buckets(exposures, count, separate_zero=zero)
    assert buckets[-1].edge is None
    assert sum(bucket.frequency for bucket in buckets) == pytest.approx(1)
    assert all(bucket.frequency > 0 for bucket in buckets)
    assert sum(bucket.weight for bucket in buckets) == pytest.approx(1)
    separate = zero and count > 1 and 0.0 in exposures and any(exposures)
    if separate:
        assert (buckets[0].edge, buckets[0].weight) == (0.0, 0.0)
        assert buckets[0].frequency == pytest.approx(exposures.count(0.0) / len(exposures))
    elif zero:
        assert buckets[0].weight > 0


@given(EXPOSURES, st.integers(1, 6), st.booleans())
def test_neither_their_order_nor_their_unit_matters(exposures: list[float], count: int, zero: bool) -> None:
    buckets = exposure_buckets(exposures, count, separate_zero=zero)
    assert exposure_buckets(exposures[::-1], count, separate_zero=zero) == buckets
    larger = exposure_buckets([value * 8 for value in exposures], count, separate_zero=zero)
    assert [(b.frequency, b.weight) for b in larger] == [(b.frequency, b.weight) for b in buckets]


def test_many_exposures_are_cut_fast() -> None:
    exposures = [abs(math.sin(n)) ** 3 for n in range(20_000)]
    buckets = exposure_buckets(exposures, 4, separate_zero=True)
    assert len(buckets) == 4
    assert min(bucket.frequency for bucket in buckets[1:]) > 0.05


def test_clusters_are_told_apart_wherever_their_weight_lies() -> None:
    exposures = [0.0] * 30 + [0.9, 1.0, 1.1] * 100 + [9.0, 10.0, 11.0]
    assert exposure_edges(exposures, 3, separate_zero=True) == (0.0, 1.1)
    assert exposure_edges(exposures, 2, separate_zero=True) == (0.0,)
    assert exposure_edges(exposures, 1, separate_zero=True) == ()


def test_without_leave_zero_is_like_any_other() -> None:
    assert exposure_edges([0.0, 0.001, 5.0, 6.0], 2, separate_zero=False) == (0.001,)


def test_one_exposure_is_one_bucket() -> None:
    for exposures in ([0.0] * 5, [2.0] * 5, [2.0]):
        assert exposure_buckets(exposures, 4, separate_zero=True) == (Bucket(None, 1.0, 1.0),)


def test_an_exposure_at_an_edge_belongs_below_it() -> None:
    edges = (0.0, 1.0)
    assert [bucket_of(edges, value) for value in (0.0, 1e-300, 1.0, 1.0000001, math.inf)] == [0, 1, 1, 2, 2]
    assert bucket_of((), 5.0) == 0


@pytest.mark.parametrize("exposures", [[], [1.0, -0.5], [math.nan], [math.inf]])
def test_exposures_that_are_none_are_refused(exposures: list[float]) -> None:
    with pytest.raises(UsageError, match="exposure"):
        exposure_edges(exposures, 4, separate_zero=True)


def test_no_buckets_are_refused() -> None:
    with pytest.raises(UsageError, match="0 exposure buckets"):
        exposure_edges([1.0], 0, separate_zero=True)
