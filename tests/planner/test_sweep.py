"""What a sweep says of every pair of a budget and a risk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from calibrated import calibrated, calibrated_profiles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.recorder import Recorder
from strategies import llama_profile

from hilore_plan.planner.asked import buckets_of, check_risk, risk_asked
from hilore_plan.planner.plan import solve_plan
from hilore_plan.planner.risk import exact_view
from hilore_plan.planner.solve import Planner
from hilore_plan.planner.sweep import FrontierPoint, _Ladder, sweep
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.profile import Profile

PROFILE = calibrated(llama_profile(blocks=8, lengths=(256, 512)))
BUDGETS, RISKS = ("0.1x-gc", "1.0x-gc", "9x-store"), ("0", "0.005", "0.02")


def test_a_sweep_has_every_pair() -> None:
    progress = Recorder()
    points = sweep(PROFILE, budgets=BUDGETS, risks=RISKS, progress=progress)
    assert [(point.budget, point.risk) for point in points] == list(product(BUDGETS, RISKS))
    infeasible, tight, ample = points[:3], points[3:6], points[6:]
    assert {(point.binding, point.step_seconds) for point in infeasible} == {("infeasible", None)}
    assert {(point.binding, point.expected_error) for point in ample} == {("neither", 0.0)}
    seconds = [point.step_seconds or 0 for point in tight]
    assert seconds == sorted(seconds, reverse=True)
    # the plans for 0.005 are those for 0.00525, too: so little more risk is of no use there
    assert [point.binding for point in tight] == ["memory", "memory", "risk"]
    gc = PROFILE.points[-1].gc.step_seconds
    for point, limit in zip(tight, (0.0, 0.005, 0.02), strict=True):
        assert point.expected_error is not None
        assert point.expected_error <= limit * (1 + 1e-6)
        assert point.peak_bytes is not None
        assert point.peak_bytes <= point.limit_bytes
        assert point.speed_vs_gc == pytest.approx(gc / (point.step_seconds or 1))
    assert progress.told == ["Solving 3", *BUDGETS, "done"]


def test_a_sweep_agrees_with_plans() -> None:
    for point in sweep(PROFILE, budgets=["1.0x-gc"], risks=["0", "0.01"]):
        entries = solve_plan(PROFILE, budget="1.0x-gc", risk=point.risk, token_buckets=1).entries
        seconds = sum(entry.frequency * entry.predicted.step_seconds for entry in entries)
        assert point.step_seconds == pytest.approx(seconds, rel=2e-3)


def check_monotone(points: Sequence[FrontierPoint]) -> None:
    """More memory and more risk: never slower, not by a last digit, and never impossible."""
    for tight, loose in product(points, repeat=2):
        if tight.limit_bytes > loose.limit_bytes or check_risk(tight.risk) > check_risk(loose.risk):
            continue
        if tight.step_seconds is not None:
            assert loose.step_seconds is not None
            assert loose.step_seconds <= tight.step_seconds


def test_neither_more_memory_nor_more_risk_is_ever_slower() -> None:
    """Budgets and risks so close that a plan within the solver's gap of the best is easily beaten by its neighbour."""
    profile = calibrated(llama_profile(blocks=5, lengths=(256,)))
    budgets = [f"{0.99 + 0.003 * step:.3f}x-gc" for step in (2, 0, 1)]
    check_monotone(sweep(profile, budgets=budgets, risks=("0.01", "0", "0.0102")))


@pytest.mark.parametrize("risk", ["0", "0.01"])
def test_what_a_smaller_budget_found_is_known_to_a_larger_one(risk: str) -> None:
    """However lucky it was: here, faster than anything that the solver can find."""
    profile = calibrated(llama_profile(blocks=1, lengths=(64,)))
    wanted = risk_asked(profile, risk)
    planners = Planner("highs"), Planner("highs")
    ladder = _Ladder(view_at(profile, 64), [wanted], buckets_of(wanted, 1), *planners)
    limit = planners[0].least(exact_view(ladder.view)).simulation.peak_bytes
    ladder.climb(limit)
    assert ladder.curve is not None
    exact = ladder.curve.exact
    lucky = replace(exact, simulation=replace(exact.simulation, recompute_seconds=-1.0))
    if wanted is None:
        ladder.curve.exact = lucky
    else:
        ladder.curve.plans.append(lucky)
    (shared,) = ladder.climb(limit + 1)
    assert shared is not None
    assert shared.plans == (lucky,)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    calibrated_profiles(),
    st.lists(st.integers(1, 400), min_size=2, max_size=4),
    st.lists(st.sampled_from([0, 1e-9, 0.5, 1, 2.5, 4, 30]), min_size=2, max_size=4),
)
def test_no_profile_makes_a_sweep_slower_for_more(profile: Profile, budgets: list[int], risks: list[float]) -> None:
    assert profile.risk is not None
    profile = profile.model_copy(update={"risk": profile.risk.model_copy(update={"noise": 1.0})})
    asked = [f"{risk}x-noise" for risk in risks]  # made-up errors are larger than what may be asked for as such
    check_monotone(sweep(profile, budgets=[f"{budget}B" for budget in budgets], risks=asked))


@pytest.mark.speed
def test_a_sweep_of_thirty_blocks_within_a_minute() -> None:
    began = time.perf_counter()
    sweep(
        calibrated(llama_profile(blocks=30)),
        budgets=("1.05x-gc", "1.1x-gc", "1.3x-gc"),
        risks=("0", "0.005", "0.015", "0.05"),
    )
    assert time.perf_counter() - began < 60
