"""One price of risk for all buckets: against every combination of plans, where the price leaves nothing to chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from planner.brute import every_column
from planner.hand_made import VIEWS, twice

from hilore_plan.planner.buckets import Bucket
from hilore_plan.planner.patterns import pareto
from hilore_plan.planner.risk import exact_view, total_risk, usable_view
from hilore_plan.planner.share import ENOUGH, Curve, mean_seconds, share
from hilore_plan.planner.simulate import assemble
from hilore_plan.planner.solve import Planner
from hilore_plan.planner.timeline import View
from hilore_plan.schema.record import Mode

BUCKETS = (Bucket(0.5, 0.5, 0.08), Bucket(1.5, 0.3, 0.32), Bucket(None, 0.2, 0.6))
LAMBDAS = (0.1, 0.3, 1.2, 5.0)

Point = tuple[float, float]  # seconds and risk


def fitting(view: View, limit: int) -> list[Point]:
    """Seconds and risk of every plan within a limit that is not beaten in both."""
    columns = pareto(every_column(view, 0), view.rho)
    points = []
    for chosen in itertools.product(columns, repeat=2):
        found = assemble(view, [block.cost for block in chosen])
        if found.peak_bytes <= limit:
            points.append((found.recompute_seconds, total_risk(view, chosen)))
    front: list[Point] = []
    for seconds, risk in sorted(points):
        if not front or risk < front[-1][1]:
            front.append((seconds, risk))
    return front


def least_seconds(front: Sequence[Point], allowed: float, each: float = math.inf) -> float:
    """Of one plan per bucket within the risk allowed in all, and in each of them."""
    return min(
        sum(bucket.frequency * seconds for bucket, (seconds, _) in zip(BUCKETS, plans, strict=True))
        for plans in itertools.product([point for point in front if point[1] <= each], repeat=len(BUCKETS))
        if sum(bucket.weight * risk for bucket, (_, risk) in zip(BUCKETS, plans, strict=True)) <= allowed * (1 + 1e-9)
    )


def risk_at(front: Sequence[Point], price: float) -> float:
    """The risk of a step whose buckets all choose at one price: within it, nothing is faster than what they choose."""
    total = 0.0
    for bucket in BUCKETS:
        own = price * bucket.weight / bucket.frequency
        _, risk = min(front, key=lambda point: point[0] + own * point[1])
        total += bucket.weight * risk
    return total


@pytest.mark.parametrize(("name", "room"), [("attention", 60), ("two_steps", 40), ("pair", 100)])
def test_all_buckets_pay_the_same_price(name: str, room: int) -> None:
    view = replace(twice(VIEWS[name]()), store=Mode(step_seconds=1.0, peak_bytes=1000))
    memory = Planner("highs").least(exact_view(view)).simulation.peak_bytes + room
    front = fitting(view, memory)
    exact = Planner("highs").solve(exact_view(view), memory)
    assert exact is not None
    apart = 0.0
    for price in LAMBDAS:
        allowed = risk_at(front, price)
        best = least_seconds(front, allowed)
        shared = share(Curve(usable_view(view), memory, Planner("highs"), exact), BUCKETS, math.sqrt(allowed))
        seconds = mean_seconds(BUCKETS, shared.plans)
        assert best - 1e-9 <= seconds <= best + ENOUGH
        assert seconds - shared.gap * (view.store.step_seconds + seconds) <= best + 1e-6
        apart = max(apart, least_seconds(front, allowed, each=allowed) - best)
    assert apart > 0.01  # a limit for each bucket by itself would be slower
