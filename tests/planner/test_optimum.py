"""Plans against brute force, against greedy and "all recompute", and against themselves under other budgets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner.brute import every_column
from strategies import PRICES, llama_profile, small_profiles

from hilore_plan.errors import InfeasibleBudgetError
from hilore_plan.planner import ilp_master
from hilore_plan.planner import solve as solving
from hilore_plan.planner.greedy import chain, solve_greedy
from hilore_plan.planner.ilp import BlockSolver
from hilore_plan.planner.ilp_solver import scale_for
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.patterns import Column, column, named, pareto, recompute_all
from hilore_plan.planner.plan import solve_plan
from hilore_plan.planner.rooms import fits, rooms_at
from hilore_plan.planner.simulate import Simulation, assemble, simulate
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.schema.plan import Entry
from hilore_plan.schema.profile import Profile

SMALL = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
UNITS = 6  # three actions each: at most a few hundred patterns per class


def all_columns(view: View, index: int) -> list[Column]:
    return pareto(every_column(view, index))


def brute_force(view: View) -> list[Simulation]:
    """The simulation of every choice of every block (patterns that another one beats in all respects left out)."""
    pools = [all_columns(view, index) for index in range(len(view.classes))]
    chosen = itertools.product(*(pools[index] for index in view.class_of))
    return [assemble(view, [block.cost for block in blocks]) for blocks in chosen]


def small_view(profile: Profile) -> View:
    view = view_at(profile, 1)
    assume(all(len(cls.units) <= UNITS for cls in view.classes))
    try:
        simulate(view, [named(view.class_at(i), recompute_all(view.class_at(i))) for i in range(len(view.blocks))])
    except UnrecoverableError:  # the strategy may draw a block that nobody could run backward through
        assume(False)
    return view


def by_simulator(profile: Profile, entry: Entry) -> Simulation:
    view = view_at(profile, entry.tokens_up_to)
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    return simulate(view, [actions[block] for block in view.blocks])


@SMALL
@given(small_profiles(), st.integers(0, 100), st.sampled_from(["whole", "patterns", "many"]))
def test_equals_brute_force(profile: Profile, where: int, way: str) -> None:
    view = small_view(profile)
    plans = brute_force(view)
    assume(len(plans) < 50_000)
    peaks = sorted(plan.peak_bytes for plan in plans)
    limit = peaks[0] + (peaks[-1] - peaks[0]) * where // 100
    fastest = min(plan.recompute_seconds for plan in plans if plan.peak_bytes <= limit)
    units = solving.WHOLE_UNITS if way == "whole" else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "WHOLE_UNITS", units)
        patch.setattr(ilp_master, "FEW_BLOCKS", 0 if way == "many" else 16)
        solved = solving.Planner("highs").solve(view, limit)
    assert solved is not None
    found = solved.simulation
    assert found.peak_bytes <= limit
    assert found.recompute_seconds >= fastest - 1e-9
    if way == "whole":
        assert found.recompute_seconds == pytest.approx(fastest, abs=1e-6)
        assert solved.gap == pytest.approx(0, abs=1e-6)
    else:  # what the bound promises must hold, however coarse three blocks are
        assert found.recompute_seconds - solved.gap * found.step_seconds <= fastest + 1e-6


@SMALL
@given(small_profiles())
def test_least_peak_equals_brute_force_and_is_feasible(profile: Profile) -> None:
    view = small_view(profile)
    plans = brute_force(view)
    assume(len(plans) < 50_000)
    least = min(plan.peak_bytes for plan in plans)
    assert solving.Planner("highs").least(view).simulation.peak_bytes == least
    if least > 1:
        with pytest.raises(InfeasibleBudgetError) as caught:
            solve_plan(profile, budget=f"{least - 1}B")
        assert caught.value.least_bytes == least
    if least:
        assert solve_plan(profile, budget=f"{least}B").entries[0].predicted.peak_bytes == least


@SMALL
@given(small_profiles(), PRICES, PRICES)
def test_program_of_a_block_costs_what_the_simulator_says(profile: Profile, kept: float, held: float) -> None:
    view = small_view(profile)
    for index, cls in enumerate(view.classes):
        block = BlockSolver(view, index, scale_for(1, 1000), "highs")
        pattern = block.priced(1.0, kept, [held] * (1 + cls.stages))
        cost = column(view, index, pattern).cost
        price = cost.seconds + kept * cost.kept_bytes + held * sum(cost.held_bytes)
        assert block.problem.objective.value() == pytest.approx(price, abs=1e-5)
        best = min(
            other.cost.seconds + kept * other.cost.kept_bytes + held * sum(other.cost.held_bytes)
            for other in all_columns(view, index)
        )
        assert price == pytest.approx(best, abs=1e-5)


@SMALL
@given(small_profiles(), st.integers(0, 400), st.integers(0, 100))
def test_a_smaller_budget_is_never_faster(profile: Profile, limit: int, less: int) -> None:
    view = small_view(profile)
    large = solving.Planner("highs").solve(view, limit)
    small = solving.Planner("highs").solve(view, limit - less)
    if small is not None:
        assert large is not None
        assert small.simulation.recompute_seconds >= large.simulation.recompute_seconds - 1e-6
        assert small.simulation.peak_bytes <= limit - less


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_profiles(), st.integers(0, 400))
def test_cbc_agrees(profile: Profile, limit: int) -> None:
    view = small_view(profile)
    highs, cbc = (solving.Planner(name).solve(view, limit) for name in ("highs", "cbc"))
    assert (highs is None) == (cbc is None)
    if highs is not None and cbc is not None:
        assert cbc.simulation.recompute_seconds == pytest.approx(highs.simulation.recompute_seconds, abs=1e-6)


@pytest.mark.parametrize("budget", ["1.0x-gc", "1.1x-gc", "0.9x-store"])
def test_never_worse_than_greedy_nor_than_recomputing_all(budget: str) -> None:
    profile = llama_profile(blocks=10)
    plan = solve_plan(profile, budget=budget)
    for entry in plan.entries:
        found = by_simulator(profile, entry)
        assert found.peak_bytes == entry.predicted.peak_bytes <= plan.budget.limit_bytes
        assert found.binding == entry.predicted.binding
        assert found.step_seconds == pytest.approx(entry.predicted.step_seconds)
        view = view_at(profile, entry.tokens_up_to)
        rooms = rooms_at(view, plan.budget.limit_bytes)
        greedy = solve_greedy(view, rooms, [chain(view, 0)])
        assert greedy is not None
        assert fits(rooms, [block.cost for block in greedy])
        assert found.recompute_seconds <= sum(block.cost.seconds for block in greedy) + 1e-9
        everything = column(view, 0, recompute_all(view.classes[0])).cost.seconds * 10
        assert found.recompute_seconds <= everything + 1e-9


def test_a_budget_ladder_on_a_deep_model() -> None:
    """Faults 1 and 2 of budgets on sums: no budget is exceeded, none gives a slower plan than a smaller one."""
    profile = llama_profile(blocks=12, lengths=(512,))
    before = float("inf")
    for percent in range(96, 150, 6):
        try:
            plan = solve_plan(profile, budget=f"{percent / 100}x-gc", token_buckets=1)
        except InfeasibleBudgetError:
            assert before == float("inf")
            continue
        entry = plan.entries[0]
        assert by_simulator(profile, entry).peak_bytes <= plan.budget.limit_bytes
        # both plans may be off by the gap that the solver allows itself
        assert entry.predicted.step_seconds <= before * (1 + 1e-3)
        before = entry.predicted.step_seconds
    assert before < float("inf")


def test_cbc_agrees_on_a_deep_model() -> None:
    profile = llama_profile(blocks=8, lengths=(512,))
    plans = [solve_plan(profile, budget="1.0x-gc", token_buckets=1, solver=name) for name in ("highs", "cbc")]
    highs, cbc = (plan.entries[0].predicted for plan in plans)
    assert cbc.step_seconds == pytest.approx(highs.step_seconds, rel=1e-3)
