"""The frontier of a profile: what each pair of a memory budget and a risk comes to, at the largest size.

All risks at one budget choose from one curve of plans, so a pair costs far less than a plan of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hilore_plan.planner.asked import Wanted, buckets_of, risk_asked
from hilore_plan.planner.buckets import Bucket
from hilore_plan.planner.entries import binding
from hilore_plan.planner.ilp_solver import check_solver
from hilore_plan.planner.risk import exact_view, usable_view
from hilore_plan.planner.share import Curve, Shared, choose_plans, find_price
from hilore_plan.planner.solve import Planner, Solved
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.progress import Progress, Silent
from hilore_plan.quantities import Budget
from hilore_plan.schema.profile import Profile


@dataclass(frozen=True)
class FrontierPoint:
    """One pair of a budget and a risk; a budget that no plan fits into has `binding` `infeasible` and no figures.

    `step_seconds` and `expected_error` are those of a step with the calibrated mix of exposures, `peak_bytes` is the
    highest of all buckets.
    """

    budget: str
    limit_bytes: int
    risk: str
    step_seconds: float | None = None
    speed_vs_gc: float | None = None
    peak_bytes: int | None = None
    expected_error: float | None = None
    price: float | None = None
    binding: str = "infeasible"


def sweep(
    profile: Profile,
    *,
    budgets: Sequence[str],
    risks: Sequence[str],
    exposure_buckets: int = 4,
    solver: str = "highs",
    progress: Progress | None = None,
    device_bytes: int | None = None,
) -> tuple[FrontierPoint, ...]:
    """Every budget with every risk, in the order given.

    Raises:
        UsageError: for a budget, risk, solver or number of buckets that makes no sense, or a risk without calibration.
    """
    told = progress or Silent()
    check_solver(solver)
    wanted = [risk_asked(profile, risk) for risk in risks]
    buckets = [buckets_of(one, exposure_buckets) for one in wanted]
    limits = [_limit(profile, budget, device_bytes) for budget in budgets]
    view, exact, coded = view_at(profile, profile.points[-1].tokens), Planner(solver), Planner(solver)
    told.start("Solving", len(budgets))
    points: list[FrontierPoint] = []
    for budget, limit in zip(budgets, limits, strict=True):
        found = _at_budget(view, limit, exact, coded, wanted, buckets)
        for number, risk in enumerate(risks):
            points.append(_point(view, budget, limit, risk, found[number] if found else None, buckets[number]))
        told.advance(budget)
    told.finish()
    return tuple(points)


def _limit(profile: Profile, budget: str, device_bytes: int | None) -> int:
    largest = profile.points[-1]
    return Budget.parse(budget).resolve(largest.gc.peak_bytes, largest.store.peak_bytes, device_bytes)


def _at_budget(
    view: View,
    limit: int,
    exact: Planner,
    coded: Planner,
    wanted: Sequence[Wanted | None],
    buckets: Sequence[tuple[Bucket, ...]],
) -> list[Shared] | None:
    """The plans for each risk. Prices come first, so that every risk may choose from all plans found."""
    plain = exact.solve(exact_view(view), limit)
    if plain is None:
        return None
    curve = Curve(usable_view(view), limit, coded, plain)
    pairs = list(zip(wanted, buckets, strict=True))
    prices = [0.0 if one is None else find_price(curve, own, one.limit) for one, own in pairs]
    return [_choice(curve, one, own, price) for (one, own), price in zip(pairs, prices, strict=True)]


def _choice(curve: Curve, wanted: Wanted | None, buckets: Sequence[Bucket], price: float) -> Shared:
    plans: tuple[Solved, ...] = (curve.exact,)
    if wanted is not None:
        plans = choose_plans(curve.plans, buckets, wanted.limit)
    return Shared(plans, price, sum(b.weight * plan.risk for b, plan in zip(buckets, plans, strict=True)), 0.0)


def _point(
    view: View, budget: str, limit: int, risk: str, shared: Shared | None, buckets: Sequence[Bucket]
) -> FrontierPoint:
    if shared is None:
        return FrontierPoint(budget, limit, risk)
    pairs = zip(buckets, shared.plans, strict=True)
    seconds = sum(bucket.frequency * plan.simulation.step_seconds for bucket, plan in pairs)
    return FrontierPoint(
        budget,
        limit,
        risk,
        step_seconds=seconds,
        speed_vs_gc=view.gc.step_seconds / seconds if seconds else None,
        peak_bytes=max(plan.simulation.peak_bytes for plan in shared.plans),
        expected_error=math.sqrt(shared.risk),
        price=shared.price,
        binding=binding(shared),
    )
