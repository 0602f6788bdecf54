"""Faults 1 to 3 and 5: budgets that are not kept, or that no plan could keep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import tolerances
from strategies import Graph, outside, profile_of

from hilore_plan.errors import InfeasibleBudgetError
from hilore_plan.planner.explain import explain_binding
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.plan import solve_plan
from hilore_plan.planner.simulate import simulate
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.schema.plan import Action, Plan
from hilore_plan.schema.profile import Point, Profile
from hilore_plan.schema.record import Mode

BLOCKS = 2
STAGES = 2
GIB = 2**30


def profile_with(graph: Graph, blocks: int = BLOCKS, working: int = 0, **around: int) -> Profile:
    """A profile of equal blocks at one size; a graph's bytes are those at that size."""
    point = Point(
        tokens=1,
        batch=1,
        length=1,
        classes=(graph.measure(1, STAGES, working),),
        outside=outside(blocks, **around),
        store=Mode(step_seconds=10.0, peak_bytes=1000),
        gc=Mode(step_seconds=13.0, peak_bytes=500),
        recompute_scale=1.0,
    )
    return profile_of([graph.block_class("Layer", range(blocks), STAGES)], [point])


def tall_in_between() -> Profile:
    """Blocks whose recompute goes through a value of 300 bytes, to rebuild two of 40 and one of 30."""
    graph = Graph()
    x = graph.input("x", 20, keepable=True)
    low = graph.op("low", [x], 40, 1.0, 1)
    tall = graph.op("tall", [low], 300, 1.0)
    first = graph.op("first", [tall], 40, 1.0, 0)
    graph.op("second", [first], 30, 3.0, 0)
    return profile_with(graph, working=5)


def outcomes(view: View) -> Iterator[tuple[int, float]]:
    """Peak and added seconds of every choice of every block."""
    cls = view.classes[0]
    choices: list[Action] = ["store", "recompute"]
    each = [
        dict(zip((cls.names[u] for u in cls.units), chosen, strict=True))
        for chosen in itertools.product(choices, repeat=len(cls.units))
    ]
    for blocks in itertools.product(each, repeat=len(view.blocks)):
        try:
            found = simulate(view, blocks)
        except UnrecoverableError:
            continue
        yield found.peak_bytes, found.recompute_seconds


def simulated_peak(profile: Profile, plan: Plan) -> int:
    """What the independent simulator says of a plan's largest entry."""
    entry = plan.entries[-1]
    view = view_at(profile, entry.tokens_up_to)
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    return simulate(view, [actions[block] for block in view.blocks]).peak_bytes


def test_01_a_smaller_budget_never_raises_the_peak() -> None:
    """Keeping least is not what peaks least: rebuilding goes through 300 bytes, which no sum of kept bytes has."""
    profile = tall_in_between()
    peaks = sorted({peak for peak, _ in outcomes(view_at(profile, 1))})
    plans = {limit: solve_plan(profile, budget=f"{limit}B") for limit in range(peaks[0], peaks[-1] + 1)}
    for limit, plan in plans.items():
        assert simulated_peak(profile, plan) == plan.entries[-1].predicted.peak_bytes <= limit
    seconds = [plan.entries[-1].predicted.step_seconds for plan in plans.values()]
    assert seconds == sorted(seconds, reverse=True)
    view = view_at(profile, 1)
    lean: dict[str, Action] = {"x": "store", "low": "recompute", "first": "recompute", "second": "recompute"}
    full: dict[str, Action] = dict.fromkeys(lean, "store")
    assert simulate(view, [lean] * BLOCKS).peak_bytes > simulate(view, [full] * BLOCKS).peak_bytes


@pytest.mark.parametrize("unit", [1, GIB // 128, 3 * GIB // 4], ids=["bytes", "MiB", "GiB"])
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_02_no_plan_is_a_byte_over_its_budget_nor_slower_than_it_must_be(solver: str, unit: int) -> None:
    """Each peak that any plan has is a budget, and so is each a byte below: against brute force.

    Sizes are odd and differ by a byte, so that a tolerance of the solver, relative to tens of GiB, would show.
    """
    graph = Graph()
    x = graph.input("x", 7 * unit + 1, keepable=True)
    a = graph.op("a", [x], 11 * unit + 2, 2.0, 1)
    b = graph.op("b", [a], 5 * unit + 4, 3.0, 0)
    graph.op("c", [b], 5 * unit + 5, 4.0, 0)
    profile = profile_with(graph)
    found = list(outcomes(view_at(profile, 1)))
    for limit in sorted({limit for peak, _ in found for limit in (peak, peak - 1)}):
        fastest = min((seconds for peak, seconds in found if peak <= limit), default=None)
        if fastest is None:
            with pytest.raises(InfeasibleBudgetError):
                solve_plan(profile, budget="1B", limit_bytes=limit, solver=solver)
            continue
        plan = solve_plan(profile, budget="1B", limit_bytes=limit, solver=solver)
        assert simulated_peak(profile, plan) <= limit
        least = tolerances.solver_bytes(limit)
        with_less = min((seconds for peak, seconds in found if peak <= limit - least), default=math.inf)
        assert fastest - 1e-9 <= plan.entries[-1].predicted.recompute_seconds <= with_less + 1e-9


def test_03_a_block_whose_recompute_needs_more_than_storing_it_is_stored() -> None:
    """Below the 300 bytes that a rebuild goes through, `first` is kept: and so it is where that costs more at rest."""
    profile = tall_in_between()
    least = min(peak for peak, _ in outcomes(view_at(profile, 1)))
    assert least < 300
    plan = solve_plan(profile, budget=f"{least}B")
    assert [group.actions["first"] for group in plan.entries[-1].groups] == ["store"] * len(plan.entries[-1].groups)


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("head_working_bytes", "a fused or chunked head, or a smaller micro-batch, would lower it"),
        ("optimizer_working_bytes", "an optimizer with less state, or fewer trainable parameters, would lower it"),
        ("embedding_working_bytes", "fewer trainable parameters would lower it"),
    ],
)
def test_05_a_peak_that_no_plan_can_lower_is_named_with_what_can(field: str, remedy: str) -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    graph.op("y", [x], 20, 1.0, 0)
    profile = profile_with(graph, **{field: 700})
    sentence = explain_binding(solve_plan(profile, budget="2000B").entries[-1])
    made_by = field.split("_", maxsplit=1)[0]
    assert f"The peak is made by the {made_by}" in sentence
    assert remedy in sentence or "everything is stored already" in sentence
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve_plan(profile, budget="600B")
    assert f"the peak is made by the {made_by}" in caught.value.hint
    assert remedy in caught.value.hint
    assert caught.value.least_bytes >= 700
