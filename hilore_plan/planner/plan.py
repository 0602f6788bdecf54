"""From a profile and a budget to a plan document: one solve per token bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hilore_plan.errors import InfeasibleBudgetError
from hilore_plan.planner.buckets import token_edges
from hilore_plan.planner.explain import explain_least
from hilore_plan.planner.ilp_solver import check_solver
from hilore_plan.planner.patterns import Pattern, named
from hilore_plan.planner.solve import Planner, Solved
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.progress import Progress, Silent
from hilore_plan.quantities import Budget, format_bytes
from hilore_plan.schema import plan as schema
from hilore_plan.schema.profile import Profile


def solve_plan(
    profile: Profile,
    *,
    budget: str,
    token_buckets: int = 4,
    solver: str = "highs",
    progress: Progress | None = None,
    limit_bytes: int | None = None,
    correction: Mapping[int, int] | None = None,
    device_bytes: int | None = None,
) -> schema.Plan:
    """The fastest plan whose peak stays within the budget, with one entry per token bucket.

    The same profile and arguments give the same plan, to the byte.

    Args:
        profile: what was measured.
        budget: `1.1x-gc`, `0.8x-store`, `40GiB`, `512MB` or `80%` (of `device_bytes`).
        token_buckets: how many entries; each holds up to an equal share more of the largest measured micro-batch.
        solver: `highs` or `cbc`.
        progress: told of each entry.
        limit_bytes: the limit that the budget comes to, if it is known already.
        correction: by a bucket's upper edge in tokens, how many bytes more than predicted were measured there. They are
            added to the predicted peak, which still has to be within the limit.
        device_bytes: the memory of the device.

    Raises:
        UsageError: for a budget, solver or number of buckets that makes no sense.
        InfeasibleBudgetError: if no plan stays within the budget; it says the least that one can.
    """
    asked = Budget.parse(budget)
    check_solver(solver)
    largest = profile.points[-1]
    edges = token_edges(largest.tokens, token_buckets)
    if limit_bytes is None:
        limit_bytes = asked.resolve(largest.gc.peak_bytes, largest.store.peak_bytes, device_bytes)
    extra = {edge: (correction or {}).get(edge, 0) for edge in edges}
    solved = _solve_edges(profile, edges, Planner(solver), limit_bytes, extra, progress or Silent())
    if solved is None:
        raise _infeasible(profile, edges, Planner(solver), asked, limit_bytes, extra)
    return schema.Plan(
        created=profile.created,
        model=profile.model,
        workload=profile.workload,
        environment=profile.environment,
        budget=schema.Budget(asked=asked.asked, limit_bytes=limit_bytes),
        solver=schema.Solver(name=solver, gap=max(round(found.gap, 9) for found in solved.values())),
        block_names=profile.block_names,
        classes=tuple(_fingerprint(profile, index) for index in range(len(profile.classes))),
        entries=tuple(_entry(view_at(profile, edge), solved[edge], extra[edge]) for edge in edges),
    )


def _solve_edges(
    profile: Profile, edges: tuple[int, ...], planner: Planner, limit: int, extra: Mapping[int, int], progress: Progress
) -> dict[int, Solved] | None:
    """The largest bucket first: it is the hardest, and an infeasible budget is found out at once."""
    progress.start("Solving", len(edges))
    solved: dict[int, Solved] = {}
    for edge in reversed(edges):
        found = planner.solve(view_at(profile, edge), limit - extra[edge])
        if found is None:
            progress.finish()
            return None
        solved[edge] = found
        progress.advance(f"up to {edge} tokens")
    progress.finish()
    return solved


def _infeasible(
    profile: Profile, edges: tuple[int, ...], planner: Planner, asked: Budget, limit: int, extra: Mapping[int, int]
) -> InfeasibleBudgetError:
    """Name the least peak over all buckets, what makes it, and a budget that works."""
    plans = {edge: planner.least(view_at(profile, edge)) for edge in edges}
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


def _entry(view: View, solved: Solved, extra: int) -> schema.Entry:
    simulation = solved.simulation
    return schema.Entry(
        tokens_up_to=view.tokens,
        predicted=schema.Prediction(
            step_seconds=simulation.step_seconds,
            peak_bytes=simulation.peak_bytes + extra,
            recompute_seconds=simulation.recompute_seconds,
            binding=simulation.binding,
        ),
        store=view.store,
        gc=view.gc,
        groups=_groups(view, solved),
    )


def _groups(view: View, solved: Solved) -> tuple[schema.Group, ...]:
    """Blocks of one class that are treated alike, in the order of their first block."""
    alike: dict[tuple[int, Pattern], list[int]] = {}
    for block, index, found in zip(view.blocks, view.class_of, solved.columns, strict=True):
        alike.setdefault((index, found.pattern), []).append(block)
    return tuple(
        schema.Group(
            class_name=view.classes[index].name,
            blocks=tuple(blocks),
            actions=named(view.classes[index], pattern),
        )
        for (index, pattern), blocks in alike.items()
    )
