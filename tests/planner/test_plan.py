"""Plan documents: what they say, how fast they are made, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from planner.recorder import Recorder
from strategies import Graph, llama_profile, outside, profile_of

from hilore_plan.errors import InfeasibleBudgetError, UsageError
from hilore_plan.planner.buckets import token_edges
from hilore_plan.planner.explain import activations_bind, explain_binding
from hilore_plan.planner.plan import solve_plan
from hilore_plan.planner.simulate import simulate
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Point, Profile
from hilore_plan.schema.record import Mode


def one_block(graph: Graph, stages: int, store_peak: int = 1000, **around: int) -> Profile:
    point = Point(
        tokens=1,
        batch=1,
        length=1,
        classes=(graph.measure(1, stages),),
        outside=outside(1, **around),
        store=Mode(step_seconds=10.0, peak_bytes=store_peak),
        gc=Mode(step_seconds=13.0, peak_bytes=500),
        recompute_scale=1.0,
    )
    return profile_of([graph.block_class("Layer", [0], stages)], [point])


def actions_of(plan: Plan, entry: int = -1, block: int = 0) -> dict[str, str]:
    return next(dict(group.actions) for group in plan.entries[entry].groups if block in group.blocks)


def test_the_same_profile_and_budget_give_the_same_bytes() -> None:
    plans = [solve_plan(llama_profile(blocks=6), budget="1.05x-gc").model_dump_json(by_alias=True) for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_plan_says_what_it_is_for() -> None:
    profile = llama_profile(blocks=4)
    plan = solve_plan(profile, budget="1.1x-gc")
    assert plan.created == profile.created
    assert plan.budget.asked == "1.1x-gc"
    assert plan.budget.limit_bytes == int(1.1 * profile.points[-1].gc.peak_bytes)
    assert [entry.tokens_up_to for entry in plan.entries] == [256, 512, 768, 1024]
    assert plan.classes[0].graph_hash == profile.classes[0].graph_hash
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan
    for entry, point in zip(plan.entries, profile.points, strict=True):
        assert entry.store == point.store
        assert entry.gc == point.gc
        assert sorted(block for group in entry.groups for block in group.blocks) == [0, 1, 2, 3]
        units = {value.name for value in profile.classes[0].values if value.keepable}
        assert all(set(group.actions) == units for group in entry.groups)


def test_short_micro_batches_recompute_less() -> None:
    plan = solve_plan(llama_profile(blocks=12), budget="1.0x-gc")
    shares = [entry.predicted.recompute_seconds / entry.predicted.step_seconds for entry in plan.entries]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


@pytest.mark.speed
def test_thirty_blocks_and_four_buckets_within_ten_seconds() -> None:
    profile = llama_profile(blocks=30)
    for budget in ("1.0x-gc", "1.1x-gc"):
        began = time.perf_counter()
        plan = solve_plan(profile, budget=budget)
        assert time.perf_counter() - began < 10
        assert plan.solver.gap <= 1e-3


@pytest.mark.speed
def test_eighty_wide_blocks_within_a_minute() -> None:
    profile = llama_profile(blocks=80, parts=3)
    assert sum(value.keepable for value in profile.classes[0].values) > 50
    assert len(profile.classes[0].ops) > 90
    began = time.perf_counter()
    plan = solve_plan(profile, budget="1.05x-gc", token_buckets=1)
    assert time.perf_counter() - began < 60
    assert plan.solver.gap <= 1e-3


def test_an_infeasible_budget_names_the_least_and_one_that_works() -> None:
    profile = llama_profile(blocks=12)
    with pytest.raises(InfeasibleBudgetError, match="the least that any plan can reach") as caught:
        solve_plan(profile, budget="0.5x-gc")
    least = caught.value.least_bytes
    assert str(least) in caught.value.message
    named = next(word for word in caught.value.hint.split() if word.endswith("x-gc"))
    assert solve_plan(profile, budget=named).entries[-1].predicted.peak_bytes <= least * 1.02
    plan = solve_plan(profile, budget=f"{least}B")
    assert max(entry.predicted.peak_bytes for entry in plan.entries) <= least
    with pytest.raises(InfeasibleBudgetError) as again:
        solve_plan(profile, budget=f"{least - 1}B")
    assert again.value.least_bytes == least


def test_everything_is_stored_where_it_fits() -> None:
    profile = llama_profile(blocks=4)
    plan = solve_plan(profile, budget="2x-store")
    assert plan.solver.gap == 0
    assert all(entry.predicted.recompute_seconds == 0 for entry in plan.entries)
    actions = actions_of(plan)
    assert actions.pop("hidden_states") == "recompute"  # no slot: storing it would save nothing
    assert set(actions.values()) == {"store"}


def test_a_block_whose_recompute_needs_more_memory_than_storing_it_is_stored() -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    wide = graph.op("wide", [x], 500, 1.0)
    graph.op("y", [wide], 20, 1.0, 0)
    plan = solve_plan(one_block(graph, 1), budget="100B")
    assert actions_of(plan) == {"x": "recompute", "y": "store"}
    assert plan.entries[0].predicted.peak_bytes == 20
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve_plan(one_block(graph, 1), budget="19B")
    assert caught.value.least_bytes == 20


def test_a_cast_is_chosen_where_it_is_cheaper_than_recomputing() -> None:
    """Storing y is too much, recomputing it takes a second; narrowing it takes next to nothing."""
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    y = graph.op("y", [x], 100, 1.0, 1, narrow="bfloat16", dtype="float32")
    graph.op("z", [y], 60, 5.0, 0)
    # stage 0 holds z and y narrowed, stage 1 y narrowed and widened
    plan = solve_plan(one_block(graph, 2), budget="150B")
    assert actions_of(plan) == {"x": "recompute", "y": "cast", "z": "store"}
    predicted = plan.entries[0].predicted
    assert predicted.peak_bytes == 150
    assert predicted.recompute_seconds < 1e-6
    cheaper = solve_plan(one_block(graph, 2), budget="149B")
    assert actions_of(cheaper)["y"] == "recompute"


@pytest.mark.parametrize(
    ("field", "binding", "words"),
    [
        ("head_working_bytes", "head", "logits and loss"),
        ("embedding_working_bytes", "embedding", "embedding's gradient"),
        ("optimizer_working_bytes", "optimizer", "optimizer's update"),
    ],
)
def test_a_peak_that_is_not_made_by_activations_is_explained(field: str, binding: str, words: str) -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    graph.op("y", [x], 20, 1.0, 0)
    profile = one_block(graph, 1, **{field: 700})
    entry = solve_plan(profile, budget="2000B").entries[0]
    assert entry.predicted.binding == binding
    assert words in explain_binding(entry)
    assert activations_bind(binding) == (binding == "head")
    with pytest.raises(InfeasibleBudgetError, match="least") as caught:
        solve_plan(profile, budget="600B")
    assert words in caught.value.hint
    assert "would lower it" in caught.value.hint


def test_a_peak_made_by_activations_is_explained() -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    graph.op("y", [x], 50, 1.0, 1)
    graph.op("z", [x], 30, 1.0, 0)
    entry = solve_plan(one_block(graph, 2), budget="79B").entries[0]
    assert entry.predicted.binding == "backward:0:1"
    assert "backward through block 0" in explain_binding(entry)


def test_the_limit_can_be_given_and_corrected() -> None:
    profile = llama_profile(blocks=4)
    free = solve_plan(profile, budget="80%", limit_bytes=profile.points[-1].gc.peak_bytes)
    assert free.budget.limit_bytes == profile.points[-1].gc.peak_bytes
    extra = 8 * 2**20
    tight = solve_plan(profile, budget="80%", limit_bytes=free.budget.limit_bytes, correction={1024: extra})
    entry = tight.entries[-1]
    view = view_at(profile, 1024)
    actions = [actions_of(tight, -1, block) for block in range(4)]
    assert entry.predicted.peak_bytes == simulate(view, actions).peak_bytes + extra  # type: ignore[arg-type]
    assert entry.predicted.peak_bytes <= tight.budget.limit_bytes
    assert entry.predicted.step_seconds > free.entries[-1].predicted.step_seconds
    assert tight.entries[0] == free.entries[0]


def test_a_share_of_the_device() -> None:
    profile = llama_profile(blocks=2)
    assert solve_plan(profile, budget="50%", device_bytes=2**34).budget.limit_bytes == 2**33
    with pytest.raises(UsageError, match="device"):
        solve_plan(profile, budget="50%")


def test_what_makes_no_sense_is_refused() -> None:
    profile = llama_profile(blocks=1, lengths=(64,))
    with pytest.raises(UsageError, match="no solver 'gurobi'") as caught:
        solve_plan(profile, budget="1.1x-gc", solver="gurobi")
    assert "highs, cbc" in caught.value.hint
    with pytest.raises(UsageError, match="0 token buckets"):
        solve_plan(profile, budget="1.1x-gc", token_buckets=0)


def test_token_edges() -> None:
    assert token_edges(1024, 4) == (256, 512, 768, 1024)
    assert token_edges(10, 3) == (4, 7, 10)
    assert token_edges(2, 4) == (1, 2)
    assert token_edges(5, 1) == (5,)


def test_progress_is_told_of_every_entry() -> None:
    progress = Recorder()
    solve_plan(llama_profile(blocks=2), budget="3x-gc", token_buckets=2, progress=progress)
    assert progress.told[0] == "Solving 2"
    assert len(progress.told) == 4
    assert progress.told[-1] == "done"


def test_planning_needs_no_torch_and_leaves_stdout_alone() -> None:
    program = (
        "import sys; from strategies import llama_profile; from hilore_plan.planner.plan import solve_plan;"
        "solve_plan(llama_profile(blocks=2), budget='1.0x-gc', token_buckets=1);"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def opaque(repeatable: bool) -> Graph:
    """A block that cannot be captured, as the profiler describes it: one op, with an output that is no unit."""
    graph = Graph()
    x = graph.input("input.x", 10, keepable=True)
    weight = graph.input("weight", kind="parameter")
    graph.op("forward", [x, weight], 70, 3.0, 0, recomputable=repeatable, keepable=False)  # type: ignore[arg-type]
    return graph


@pytest.mark.parametrize("budget", ["80B", "1000B"])
def test_a_block_without_a_graph_is_checkpointed_whatever_the_budget(budget: str) -> None:
    plan = solve_plan(one_block(opaque(repeatable=True), 1), budget=budget)
    assert actions_of(plan) == {"input.x": "store"}
    predicted = plan.entries[0].predicted
    assert predicted.peak_bytes == 10 + 70
    assert predicted.recompute_seconds == pytest.approx(2 * 3.0)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve_plan(one_block(opaque(repeatable=True), 1), budget="79B")
    assert caught.value.least_bytes == 80


def test_a_block_without_a_graph_that_must_not_run_twice_is_stored() -> None:
    plan = solve_plan(one_block(opaque(repeatable=False), 1), budget="80B")
    predicted = plan.entries[0].predicted
    assert predicted.recompute_seconds == 0
    assert predicted.peak_bytes == 70
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve_plan(one_block(opaque(repeatable=False), 1), budget="69B")
    assert caught.value.least_bytes == 70


@pytest.mark.parametrize("blocks", [3, 12])
def test_blocks_without_a_graph_leave_the_rest_of_the_room_to_the_others(blocks: int) -> None:
    """A few blocks are solved as a whole, more of them by patterns; one class among them has nothing to decide."""
    usual, whole = Graph(), opaque(repeatable=True)
    x = usual.input("x", 10, keepable=True)
    usual.op("y", [x], 40, 1.0, 0)
    for number in range(8):
        usual.op(f"z{number}", [x], 5, 0.1 * (number + 1), 0)
    classes = [usual.block_class("Usual", range(blocks), 1), whole.block_class("Whole", [blocks], 1)]
    around = outside(blocks + 1)
    point = (
        one_block(usual, 1)
        .points[0]
        .model_copy(update={"classes": (usual.measure(1, 1), whole.measure(1, 1)), "outside": around})
    )
    profile = profile_of(classes, [point])
    everything = solve_plan(profile, budget="9000B").entries[0]
    assert everything.predicted.recompute_seconds == pytest.approx(2 * 3.0)
    assert everything.predicted.peak_bytes == 80 * (blocks + 1)
    tight = solve_plan(profile, budget=f"{60 * (blocks + 1)}B")
    assert actions_of(tight, block=blocks) == {"input.x": "store"}
    assert tight.entries[0].predicted.peak_bytes <= 60 * (blocks + 1)
    assert tight.entries[0].predicted.recompute_seconds > 2 * 3.0
