"""The plans that a plan is compared with: what each of them may do, and that the planner is never beaten by them."""

from __future__ import annotations

import pytest
from calibrated import calibrated
from strategies import llama_profile

from hilore_plan.errors import UsageError
from hilore_plan.planner.baselines import baseline
from hilore_plan.planner.plan import solve_plan
from hilore_plan.schema.plan import Plan, codec_of
from hilore_plan.schema.profile import Profile

CODECS = ("int8", "fp8_e4m3_raw", "int4")
NAMES = ("exact-plan", "greedy", "compress-int8", "preprint")
BUDGET = "1.05x-gc"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return calibrated(llama_profile(blocks=4), codecs=CODECS, exposures=(1.0,) * 8)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return solve_plan(profile, budget=BUDGET, risk="0.02", token_buckets=1)


def actions(plan: Plan) -> set[str]:
    return {action for entry in plan.entries for group in entry.groups for action in group.actions.values()}


@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_is_a_plan_for_the_largest_micro_batches(name: str, plan: Plan, profile: Profile) -> None:
    made = baseline(name, plan, profile)
    assert [entry.tokens_up_to for entry in made.entries] == [plan.workload.tokens]
    assert sorted(block for group in made.entries[0].groups for block in group.blocks) == list(range(4))


@pytest.mark.parametrize("name", ["exact-plan", "greedy", "preprint"])
def test_within_memory_and_risk_none_is_faster_than_the_planner(name: str, plan: Plan, profile: Profile) -> None:
    (made,) = baseline(name, plan, profile).entries
    (best,) = plan.entries
    assert made.predicted.peak_bytes <= plan.budget.limit_bytes
    assert made.predicted.error <= 0.02
    assert made.predicted.step_seconds >= best.predicted.step_seconds * (1 - plan.solver.gap - 1e-9)


def test_the_exact_plan_compresses_nothing(plan: Plan, profile: Profile) -> None:
    assert not any(codec_of(action) for action in actions(baseline("exact-plan", plan, profile)))


def test_compress_int8_recomputes_nothing_that_has_a_cost(plan: Plan, profile: Profile) -> None:
    made = baseline("compress-int8", plan, profile)
    assert actions(made) == {"store", "compress:int8"}
    assert made.entries[0].predicted.compressed_share > 0


def test_the_preprint_treats_whole_blocks(plan: Plan, profile: Profile) -> None:
    (entry,) = baseline("preprint", plan, profile).entries
    for group in entry.groups:
        kinds = sorted(group.actions.values())
        assert kinds.count("compress:fp8_e4m3_raw") <= 1
        assert "store" in kinds or "recompute" in kinds
        assert not {"compress:int8", "compress:int4", "cast"} & set(kinds)


def test_greedy_uses_what_it_may(plan: Plan, profile: Profile) -> None:
    (entry,) = baseline("greedy", plan, profile).entries
    assert entry.predicted.recompute_seconds < entry.gc.step_seconds - entry.store.step_seconds
    assert any(action != "recompute" for action in actions(baseline("greedy", plan, profile)))


def test_a_profile_that_is_missing_or_another_is_named(plan: Plan) -> None:
    with pytest.raises(UsageError, match="made from a profile"):
        baseline("greedy", plan, None)
    with pytest.raises(UsageError, match="not the one"):
        baseline("greedy", plan, llama_profile(blocks=2))
