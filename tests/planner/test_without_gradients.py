"""Entries for micro-batches that begin without gradients: faster, within the budget, and only where they pay."""

from __future__ import annotations

import pytest
from calibrated import calibrated
from strategies import llama_profile, with_first_micro_batch

from hilore_plan.errors import UsageError
from hilore_plan.planner.baselines import baseline
from hilore_plan.planner.plan import solve_plan
from hilore_plan.planner.simulate import Simulation, simulate
from hilore_plan.planner.sweep import sweep
from hilore_plan.planner.timeline import view_at
from hilore_plan.planner.without_gradients import WORTH_A_PLAN, distinguished
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import Profile

PLAIN = llama_profile(blocks=6, lengths=(256, 512))
PROFILE = with_first_micro_batch(PLAIN)
BUDGET = "1.02x-gc"


def played(profile: Profile, entry: Entry) -> Simulation:
    view = view_at(profile, entry.tokens_up_to, entry.gradients)
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    return simulate(view, [actions[block] for block in view.blocks])


def pairs(plan: Plan) -> list[tuple[Entry, Entry]]:
    """The entries of each size without and with gradients."""
    none, live = ([e for e in plan.entries if e.gradients == gradients] for gradients in ("none", "live"))
    return list(zip(none, live, strict=True))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve_plan(PROFILE, budget=BUDGET, token_buckets=2)


def test_they_use_what_gradients_leave_free(plan: Plan) -> None:
    for none, live in pairs(plan):
        assert none.predicted.recompute_seconds < live.predicted.recompute_seconds
        assert max(none.predicted.peak_bytes, live.predicted.peak_bytes) <= plan.budget.limit_bytes
    for entry in plan.entries:
        assert entry.predicted.peak_bytes == played(PROFILE, entry).peak_bytes


def test_they_would_not_fit_once_gradients_are_there(plan: Plan) -> None:
    for none, live in pairs(plan):
        later = none.model_copy(update={"gradients": "live"})
        assert played(PROFILE, later).peak_bytes > plan.budget.limit_bytes >= played(PROFILE, live).peak_bytes


def test_the_others_are_those_of_a_profile_that_knows_no_difference(plan: Plan) -> None:
    plain = solve_plan(PLAIN, budget=BUDGET, token_buckets=2)
    assert [live for _, live in pairs(plan)] == list(plain.entries)
    assert not plain.distinguishes_gradients
    assert plan.distinguishes_gradients


def test_entries_ascend_by_tokens_then_gradients_then_exposure() -> None:
    found = solve_plan(with_first_micro_batch(calibrated(PLAIN)), budget=BUDGET, risk="0.01", token_buckets=2)
    edges = [
        (e.tokens_up_to, e.gradients == "live", 99.0 if e.exposure_up_to is None else e.exposure_up_to)
        for e in found.entries
    ]
    assert edges == sorted(edges)
    assert len(edges) == 2 * 2 * len({e.exposure_up_to for e in found.entries})
    assert found.entries[-1].gradients == "live"
    largest = [entry for entry in found.entries if entry.tokens_up_to == 512]
    assert sum(map(found.share, largest)) == pytest.approx(1.0)
    for gradients in ("none", "live"):
        squares = (e.weight * e.predicted.error**2 for e in largest if e.gradients == gradients)
        assert sum(squares) <= 0.01**2 * (1 + 1e-6), "each kind keeps the limit by itself"


def test_small_gradients_get_no_entries_of_their_own() -> None:
    gradients = PROFILE.points[-1].outside.gradient_bytes
    assert distinguished(PROFILE, int(gradients / WORTH_A_PLAN)) == ("none", "live")
    assert distinguished(PROFILE, int(gradients / WORTH_A_PLAN) + 100) == ("live",)
    assert distinguished(PLAIN, 1) == ("live",)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="begin without gradients"):
        view_at(PLAIN, 512, "none")


def test_a_sweep_has_the_mix_of_both(plan: Plan) -> None:
    (point,) = sweep(PROFILE, budgets=[BUDGET], risks=["0"])
    largest = [entry for entry in plan.entries if entry.tokens_up_to == 512]
    expected = sum(plan.share(entry) * entry.predicted.step_seconds for entry in largest)
    assert point.step_seconds == pytest.approx(expected, rel=1e-3)
    assert point.peak_bytes == max(entry.predicted.peak_bytes for entry in largest)
    (lone,) = sweep(PLAIN, budgets=[BUDGET], risks=["0"])
    assert (point.step_seconds or 0) < (lone.step_seconds or 0)


@pytest.mark.parametrize("name", ["exact-plan", "greedy"])
def test_what_a_plan_is_compared_with_may_tell_them_apart_as_well(name: str, plan: Plan) -> None:
    (pair,) = pairs(baseline(name, plan, PROFILE))
    assert pair[0].predicted.recompute_seconds < pair[1].predicted.recompute_seconds
