"""From a profile, a budget and a risk to a plan document: per token bucket, an entry for each exposure bucket.

Micro-batches that begin without gradients have entries of their own beside the others: see `without_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hilore_plan.errors import InfeasibleBudgetError
from hilore_plan.planner.asked import Wanted, buckets_of, risk_asked
from hilore_plan.planner.buckets import Bucket, token_edges
from hilore_plan.planner.entries import entry, risk_budget
from hilore_plan.planner.explain import explain_least
from hilore_plan.planner.ilp_solver import check_solver
from hilore_plan.planner.risk import exact_view, usable_view
from hilore_plan.planner.share import Curve, Shared, share
from hilore_plan.planner.solve import Planner
from hilore_plan.planner.timeline import view_at
from hilore_plan.planner.without_gradients import distinguished
from hilore_plan.progress import Progress, Silent
from hilore_plan.quantities import Budget, format_bytes
from hilore_plan.schema import plan as schema
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import GradientState

# tokens of a micro-batch at most, and what it begins with
Place = tuple[int, GradientState]


def solve_plan(
    profile: Profile,
    *,
    budget: str,
    risk: str | None = None,
    token_buckets: int = 4,
    exposure_buckets: int = 4,
    solver: str = "highs",
    progress: Progress | None = None,
    limit_bytes: int | None = None,
    correction: Mapping[int, int] | None = None,
    device_bytes: int | None = None,
) -> schema.Plan:
    """The fastest plan whose peak stays within the budget and whose gradient error stays within the risk.

    It has one entry per token bucket and, where anything may be compressed, per exposure bucket of it; twice as many
    where it pays to tell micro-batches that begin without gradients from others. The budget has to be feasible without
    compression: a micro-batch that turns out riskier than thought is rebuilt exactly. The same profile and arguments
    give the same plan, to the byte.

    Args:
        profile: what was measured.
        budget: `1.1x-gc`, `0.8x-store`, `40GiB`, `512MB` or `80%` (of `device_bytes`).
        risk: the relative gradient error that a step may have: `0.015`, `0.3x-noise` (of the profile's noise floor), or
            `0`: nothing is compressed. By default 0.015 with a calibrated profile, and 0 with any other.
        token_buckets: how many sizes; each holds up to an equal share more of the largest measured micro-batch.
        exposure_buckets: into how many intervals the calibrated exposures are cut.
        solver: `highs` or `cbc`.
        progress: told of each entry.
        limit_bytes: the limit that the budget comes to, if it is known already.
        correction: by a bucket's upper edge in tokens, how many bytes more than predicted were measured there. They are
            added to the predicted peak, which still has to be within the limit.
        device_bytes: the memory of the device.

    Raises:
        UsageError: for a budget, risk, solver or number of buckets that makes no sense, or a risk without calibration.
        InfeasibleBudgetError: if no plan stays within the budget; it says the least that one can.
    """
    asked = Budget.parse(budget)
    check_solver(solver)
    wanted = risk_asked(profile, risk)
    buckets = buckets_of(wanted, exposure_buckets)
    largest = profile.points[-1]
    edges = token_edges(largest.tokens, token_buckets)
    if limit_bytes is None:
        limit_bytes = asked.resolve(largest.gc.peak_bytes, largest.store.peak_bytes, device_bytes)
    extra = {edge: (correction or {}).get(edge, 0) for edge in edges}
    job = _Job(profile, limit_bytes, extra, wanted, buckets, solver)
    places = [(edge, gradients) for edge in edges for gradients in distinguished(profile, limit_bytes)]
    solved = job.solve(places, progress or Silent())
    if solved is None:
        raise _infeasible(profile, edges, Planner(solver), asked, limit_bytes, extra)
    return schema.Plan(
        created=profile.created,
        model=profile.model,
        workload=profile.workload,
        environment=profile.environment,
        budget=schema.Budget(asked=asked.asked, limit_bytes=limit_bytes),
        risk=None if wanted is None else risk_budget(wanted, list(solved.values())),
        solver=schema.Solver(name=solver, gap=max(round(found.gap, 9) for found in solved.values())),
        block_names=profile.block_names,
        classes=tuple(_fingerprint(profile, index) for index in range(len(profile.classes))),
        entries=tuple(
            entry(view_at(profile, edge, gradients), found, bucket, extra[edge], gradients)
            for (edge, gradients), shared in solved.items()
            for bucket, found in zip(buckets, shared.plans, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Job:
    """Everything asked for, to be solved for each kind of micro-batch: its size, and what gradients it begins with."""

    profile: Profile
    limit: int
    extra: Mapping[int, int]
    wanted: Wanted | None
    buckets: tuple[Bucket, ...]
    solver: str

    def solve(self, places: Sequence[Place], progress: Progress) -> dict[Place, Shared] | None:
        """By place, in the order given; None if one of them has no plan.

        The last one, the largest with its gradients live, comes first: it is the hardest, and an infeasible budget is
        found out at once.
        """
        progress.start("Solving", len(places))
        exact, coded = Planner(self.solver), Planner(self.solver)
        solved: dict[Place, Shared] = {}
        for place in reversed(places):
            found = self._at(place, exact, coded)
            if found is None:
                progress.finish()
                return None
            solved[place] = found
            progress.advance(f"up to {place[0]} tokens")
        progress.finish()
        return {place: solved[place] for place in places}

    def _at(self, place: Place, exact: Planner, coded: Planner) -> Shared | None:
        view, limit = view_at(self.profile, *place), self.limit - self.extra[place[0]]
        found = exact.solve(exact_view(view), limit)
        if found is None or self.wanted is None:
            return None if found is None else Shared((found,), 0.0, 0.0, found.gap)
        return share(Curve(usable_view(view), limit, coded, found), self.buckets, self.wanted.limit)


def _infeasible(
    profile: Profile, edges: tuple[int, ...], planner: Planner, asked: Budget, limit: int, extra: Mapping[int, int]
) -> InfeasibleBudgetError:
    """Name the least peak over all buckets, what makes it, and a budget that works."""
    plans = {edge: planner.least(exact_view(view_at(profile, edge))) for edge in edges}
    worst = max(edges, key=lambda edge: plans[edge].simulation.peak_bytes + extra[edge])
    least = plans[worst].simulation.peak_bytes + extra[worst]
    return InfeasibleBudgetError(
        f"the budget {asked.asked} ({format_bytes(limit)}) is too small: "
        f"the least that any plan can reach is {format_bytes(least)} ({least} bytes)",
        hint=f"use --budget {_working_budget(profile, asked, least)} or more; {explain_least(plans[worst].simulation)}",
        least_bytes=least,
    )


def _working_budget(profile: Profile, asked: Budget, least: int) -> str:
    """The smallest round budget that is feasible, in the form that the user chose where that is possible."""
    base = {"gc": profile.points[-1].gc.peak_bytes, "store": profile.points[-1].store.peak_bytes}.get(asked.kind)
    if base:
        hundredths = math.ceil(100 * least / base)
        while math.floor(hundredths / 100 * base) < least:
            hundredths += 1
        return f"{hundredths / 100:.2f}x-{asked.kind}"
    return f"{math.ceil(least / 2**20)}MiB" if least >= 2**20 else f"{least}B"


def _fingerprint(profile: Profile, index: int) -> schema.Fingerprint:
    cls = profile.classes[index]
    return schema.Fingerprint(name=cls.name, graph_hash=cls.graph_hash, blocks=cls.blocks, parameters=cls.parameters)
