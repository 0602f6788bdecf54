"""The frontier of a profile: what each pair of a memory budget and a risk comes to, at the largest size.

All risks at one budget choose from one curve of plans, so a pair costs far less than a plan of its own. Budgets are
solved from the smallest on, and each knows the plans of those before it, which fit into it as well. So more memory or
more risk never makes a step slower, not by a last digit, although no plan is solved to the very optimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hilore_plan.planner.asked import Wanted, buckets_of, risk_asked
from hilore_plan.planner.buckets import Bucket
from hilore_plan.planner.entries import binding
from hilore_plan.planner.ilp_solver import check_solver
from hilore_plan.planner.risk import exact_view, usable_view
from hilore_plan.planner.share import Curve, Shared, choice, find_price_and_beyond, mean_seconds
from hilore_plan.planner.solve import Planner
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.planner.without_gradients import distinguished
from hilore_plan.progress import Progress, Silent
from hilore_plan.quantities import Budget
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import GradientState


@dataclass(frozen=True)
class FrontierPoint:
    """One pair of a budget and a risk; a budget that no plan fits into has `binding` `infeasible` and no figures.

    `step_seconds` and `expected_error` are those of a step with the calibrated mix of exposures, `peak_bytes` is the
    highest of all buckets. Price and binding are those of micro-batches that begin with the gradients of others.
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
    # all risks have the same buckets, those too that make no difference between them: their seconds are the same sums
    buckets = buckets_of(next((one for one in wanted if one is not None), None), exposure_buckets)
    limits = [_limit(profile, budget, device_bytes) for budget in budgets]
    exact, coded = Planner(solver), Planner(solver)
    ladders = {
        gradients: _Ladder(view_at(profile, profile.points[-1].tokens, gradients), wanted, buckets, exact, coded)
        for gradients in distinguished(profile, min(limits))
    }
    told.start("Solving", len(budgets))
    points: dict[int, list[FrontierPoint]] = {}
    for place in sorted(range(len(budgets)), key=limits.__getitem__):
        climbed = {gradients: ladder.climb(limits[place]) for gradients, ladder in ladders.items()}
        points[place] = [
            _point(profile, FrontierPoint(budgets[place], limits[place], risk), _kinds(climbed, number), buckets)
            for number, risk in enumerate(risks)
        ]
        told.advance(budgets[place])
    told.finish()
    return tuple(point for place in range(len(budgets)) for point in points[place])


def _kinds(climbed: Mapping[GradientState, Sequence[Shared | None]], number: int) -> dict[GradientState, Shared]:
    """By kind of micro-batch, what one risk comes to; nothing if one kind has no plan."""
    kinds = {gradients: found for gradients, each in climbed.items() if (found := each[number]) is not None}
    return kinds if len(kinds) == len(climbed) else {}


def _limit(profile: Profile, budget: str, device_bytes: int | None) -> int:
    largest = profile.points[-1]
    return Budget.parse(budget).resolve(largest.gc.peak_bytes, largest.store.peak_bytes, device_bytes)


@dataclass
class _Ladder:
    """One view under ascending limits. `curve` has the plans of the limit before: they fit under the next one, too."""

    view: View
    wanted: Sequence[Wanted | None]
    buckets: Sequence[Bucket]
    exact: Planner
    coded: Planner
    curve: Curve | None = None

    def climb(self, limit: int) -> list[Shared | None]:
        """The plans for each risk, None where the limit has none.

        Prices come first, so that every risk may choose from all plans found.
        """
        curve = self.curve = self._curve(limit)
        if curve is None:
            return [None] * len(self.wanted)
        prices = [0.0 if one is None else find_price_and_beyond(curve, self.buckets, one.limit) for one in self.wanted]
        return [self._choice(curve, one, price) for one, price in zip(self.wanted, prices, strict=True)]

    def _curve(self, limit: int) -> Curve | None:
        plain, before = self.exact.solve(exact_view(self.view), limit), self.curve
        exact = [plan for plan in (plain, before.exact if before else None) if plan is not None]
        if not exact:
            return None
        best = min(exact, key=lambda plan: plan.simulation.recompute_seconds)
        return Curve(usable_view(self.view), limit, self.coded, best, before.plans if before else ())

    def _choice(self, curve: Curve, wanted: Wanted | None, price: float) -> Shared:
        if wanted is None:
            return Shared((curve.exact,) * len(self.buckets), 0.0, 0.0, 0.0)
        return choice(curve.plans, self.buckets, wanted.limit, price)


def _point(
    profile: Profile, asked: FrontierPoint, kinds: Mapping[GradientState, Shared], buckets: Sequence[Bucket]
) -> FrontierPoint:
    """The point that was asked for, with its figures if it has any."""
    if not kinds:
        return asked
    largest, last = profile.points[-1], kinds["live"]
    shares = {each: profile.workload.share(each) if len(kinds) > 1 else 1.0 for each in kinds}
    extra = sum(shares[each] * mean_seconds(buckets, found.plans) for each, found in kinds.items())
    seconds = largest.store.step_seconds + extra
    return replace(
        asked,
        step_seconds=seconds,
        speed_vs_gc=largest.gc.step_seconds / seconds if seconds else None,
        peak_bytes=max(plan.simulation.peak_bytes for found in kinds.values() for plan in found.plans),
        expected_error=math.sqrt(sum(shares[each] * found.risk for each, found in kinds.items())),
        price=last.price,
        binding=binding(last),
    )
