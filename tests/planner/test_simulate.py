"""The simulator against an example worked out by hand, and its refusals."""

from __future__ import annotations

import pytest
from strategies import Graph, llama_profile, outside, profile_of

from hilore_plan.errors import UsageError
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.simulate import PointBytes, simulate, timeline
from hilore_plan.planner.timeline import View, point_names, view_at
from hilore_plan.schema.plan import Action
from hilore_plan.schema.profile import Point, Profile
from hilore_plan.schema.record import Mode

MODE = Mode(step_seconds=100.0, peak_bytes=10_000)


def staged_profile(accumulation: bool = True) -> Profile:
    """Two blocks of x -> a -> b -> c in two stages: c and b are slots of stage 0, a of stage 1; b is castable."""
    graph = Graph()
    x = graph.input("x", 100, keepable=True)
    a = graph.op("a", [x], 40, 1.0, 1)
    b = graph.op("b", [a], 80, 2.0, 0, narrow="bfloat16")
    graph.op("c", [b], 7, 4.0, 0)
    cls = graph.block_class("Layer", range(2), 2)
    measure = graph.measure(1, 2).model_copy(update={"stage_working_bytes": (5, 3), "forward_working_bytes": 11})
    around = outside(
        2,
        parameter_bytes=1000,
        optimizer_bytes=2000,
        batch_bytes=10,
        gradient_bytes=500,
        head_gradient_bytes=50,
        block_gradient_bytes=(100, 150),
        embedding_bytes=20,
        head_working_bytes=30,
        embedding_working_bytes=9,
        optimizer_working_bytes=6,
    )
    point = Point(
        tokens=1, batch=1, length=1, classes=(measure,), outside=around, store=MODE, gc=MODE, recompute_scale=0.5
    )
    return profile_of([cls], [point], accumulation, micro_batches=3)


def acts(x: Action, a: Action, b: Action, c: Action) -> dict[str, Action]:
    return {"x": x, "a": a, "b": b, "c": c}


def test_staged_rebuild_by_hand() -> None:
    """Block 0 keeps x and b: stage 0 rebuilds c from b, stage 1 rebuilds a from x. Block 1 keeps x alone."""
    view = view_at(staged_profile(), 1)
    actions = [acts("store", "recompute", "store", "recompute"), acts("store", "recompute", "recompute", "recompute")]
    result = simulate(view, actions)
    fixed = 1000 + 2000 + 10 + 20
    assert result.points == (
        PointBytes("forward:0", fixed, 500, 180, 0, 11),
        PointBytes("forward:1", fixed, 500, 280, 0, 11),
        PointBytes("head", fixed, 500, 280, 0, 30),
        # stage 0 of block 1 runs a, b and c; x is needed by nothing afterwards, a is a slot of stage 1
        PointBytes("backward:1:0", fixed, 500, 180 + 100, 40 + 80 + 7, 5),
        PointBytes("backward:1:1", fixed, 500, 180 + 0, 40, 3),
        # b is no longer needed in stage 1 of block 0, but x is: a is rebuilt from it there
        PointBytes("backward:0:0", fixed, 500, 100 + 80, 7, 5),
        PointBytes("backward:0:1", fixed, 500, 100, 40, 3),
        PointBytes("embedding", fixed, 500, 0, 0, 9),
        PointBytes("optimizer", fixed - 20, 500, 0, 0, 6),
    )
    assert result.binding == "backward:1:0"
    assert result.peak_bytes == fixed + 500 + 280 + 127 + 5
    # three micro-batches at half the ops' own seconds: a and c in block 0, a, b and c in block 1
    assert result.recompute_seconds == pytest.approx(3 * 0.5 * ((1 + 4) + (1 + 2 + 4)))
    assert result.step_seconds == pytest.approx(100 + result.recompute_seconds)
    assert tuple(point.name for point in result.points) == point_names(view)
    assert timeline(view, actions) == result.points


def test_cast_keeps_the_narrow_bytes_and_widens_while_needed() -> None:
    view = view_at(staged_profile(), 1)
    actions = [acts("store", "store", "cast", "store")] * 2
    points = {point.name: point for point in timeline(view, actions)}
    kept = 100 + 40 + 40 + 7
    assert points["forward:0"].kept == kept
    # x is needed by nothing, yet it is there until backward of its block begins
    assert (points["backward:0:0"].kept, points["backward:0:0"].rebuilt) == (kept, 80)
    assert (points["backward:0:1"].kept, points["backward:0:1"].rebuilt) == (40, 0)
    seconds = view.classes[0].forms[2][0].seconds
    assert seconds > 0
    assert simulate(view, actions).recompute_seconds == pytest.approx(3 * 2 * seconds)


def test_gradients_arise_without_accumulation() -> None:
    view = view_at(staged_profile(accumulation=False), 1)
    points = {
        point.name: point.gradients
        for point in timeline(view, [acts("store", "recompute", "recompute", "recompute")] * 2)
    }
    assert points == {
        "forward:0": 0,
        "forward:1": 0,
        "head": 50,
        "backward:1:0": 50 + 150,
        "backward:1:1": 50 + 150,
        "backward:0:0": 50 + 150 + 100,
        "backward:0:1": 50 + 150 + 100,
        "embedding": 500,
        "optimizer": 500,
    }


def test_what_cannot_be_found_is_refused() -> None:
    view = view_at(staged_profile(), 1)
    with pytest.raises(UnrecoverableError, match="Layer: nothing can rebuild x"):
        simulate(view, [acts("recompute", "recompute", "recompute", "recompute")] * 2)
    with pytest.raises(UnrecoverableError, match="a has no narrower form"):
        simulate(view, [acts("store", "cast", "recompute", "recompute")] * 2)


def test_the_output_of_a_random_op_must_be_kept() -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    mask = graph.op("mask", [x], 5, 1.0, 0, recomputable=False)
    graph.op("dropped", [x, mask], 10, 1.0, 0)
    point = staged_profile().points[0].model_copy(update={"classes": (graph.measure(1, 1),), "outside": outside(1)})
    view = view_at(profile_of([graph.block_class("Layer", [0], 1)], [point]), 1)
    simulate(view, [{"x": "store", "mask": "store", "dropped": "recompute"}])
    with pytest.raises(UnrecoverableError, match="mask cannot be recomputed"):
        simulate(view, [{"x": "store", "mask": "recompute", "dropped": "recompute"}])


def test_every_output_of_an_op_counts_in_its_own_stage() -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    graph.op_many("pair", [x], [("used", 20, (0, 1)), ("kept", 30, (1,))], 1.0)
    point = staged_profile().points[0].model_copy(update={"classes": (graph.measure(1, 2),), "outside": outside(1)})
    view = view_at(profile_of([graph.block_class("Layer", [0], 2)], [point]), 1)
    points = {point.name: point for point in timeline(view, [{"x": "store", "used": "recompute", "kept": "store"}])}
    assert points["backward:0:0"].rebuilt == 20 + 30
    assert points["backward:0:1"].rebuilt == 20


def chain(**measured: object) -> View:
    """x -> p -> q -> r -> s in one stage: r and s are slots, p and q are only made on the way."""
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    p = graph.op("p", [x], 100, 1.0)
    q = graph.op("q", [p], 200, 1.0)
    r = graph.op("r", [q], 30, 1.0, 0)
    graph.op("s", [r], 40, 1.0, 0)
    measure = graph.measure(1, 1).model_copy(update={"stage_working_bytes": (50,), **measured})
    point = staged_profile().points[0].model_copy(update={"classes": (measure,), "outside": outside(1)})
    return view_at(profile_of([graph.block_class("Layer", [0], 1)], [point]), 1)


def test_a_frame_has_room_to_rebuild_exactly_what_it_compressed() -> None:
    """As planned r is decoded. If it turns out riskier, p, q and r are made, and the codes of r are still there.

    Then the room that backward needs has to be there for either.
    """
    codes = {"codec_bytes": {"int8": (0, 0, 0, 8, 0)}, "codec_seconds": {"int8": (0.0, 0.0, 0.0, 0.1, 0.0)}}
    kept = 10 + 8 + 40
    assert backward_of(chain(**codes), "compress:int8", "store") == (kept, 100 + 200, 50)
    assert backward_of(chain(**codes, stage_working_bytes=(900,)), "compress:int8", "store") == (kept, 300, 900)
    asked = {"asked_values": ((3, 4),), "asked_bytes": ((5, 60),)}
    assert backward_of(chain(**codes, **asked), "compress:int8", "store") == (kept, 100 + 200, 5)
    # what is rebuilt of it in any case is rebuilt of its exact values, and they of x
    assert backward_of(chain(**codes, **asked), "compress:int8", "recompute") == (10 + 8, 100 + 200, 5)


def backward_of(view: View, r: Action, s: Action) -> tuple[int, int, int]:
    (point,) = (p for p in timeline(view, [{"x": "store", "r": r, "s": s}]) if p.name == "backward:0:0")
    return point.kept, point.rebuilt, point.working


def test_what_is_made_on_the_way_is_gone_before_backward_goes_on() -> None:
    """p dies when q has been made, q when r has; only then does backward need its working memory."""
    asked = {"asked_values": ((4, 3),), "asked_bytes": ((5, 60),)}
    assert backward_of(chain(), "recompute", "recompute") == (10, 100 + 200, 50)  # nobody looked: all at once
    assert backward_of(chain(**asked), "recompute", "recompute") == (10, 100 + 200, 5)
    large = {**asked, "stage_working_bytes": (900,)}
    assert backward_of(chain(**large), "recompute", "recompute") == (0, 30 + 40, 900)  # x is gone as well
    # s is made of r, which is kept: the program has one op
    assert backward_of(chain(**asked), "store", "recompute") == (30, 40, 50)


def test_a_stage_is_rebuilt_when_the_first_missing_value_is_asked_for() -> None:
    """s is asked for first. If it is kept, backward has gone on until r is asked for, and holds 60 bytes by then."""
    view = chain(asked_values=((4, 3),), asked_bytes=((5, 60),))
    assert backward_of(view, "recompute", "store") == (50, 100 + 200, 60)


def test_nothing_is_rebuilt_before_the_first_missing_value_is_asked_for() -> None:
    """s is asked for first, then r; backward holds 900 bytes before, between or after."""
    asked = {"asked_values": ((4, 3),), "asked_bytes": ((0, 0),)}
    before, between, after = (chain(**asked, asked_peaks=(peaks,)) for peaks in ((900, 0, 0), (0, 900, 0), (0, 0, 900)))
    for view in (before, between):
        assert backward_of(view, "recompute", "store") == (10 + 40, 0, 900)
    assert backward_of(after, "recompute", "store") == (40, 30, 900)
    assert backward_of(before, "store", "recompute") == (10 + 30, 0, 900)
    for view in (between, after):
        assert backward_of(view, "store", "recompute") == (30, 40, 900)


@pytest.mark.parametrize(
    ("r", "peaks", "held"),
    [
        ("store", (300, 100, 80, 70), (0, 10 + 300)),
        ("store", (84, 80, 75, 70), (30, 10 + 70)),
        ("compress:int8", (84, 80, 75, 70), (8, 10 + 80)),
        ("recompute", (84, 80, 75, 70), (0, 10 + 84)),
    ],
)
def test_what_is_kept_counts_in_forward_from_when_it_would_be_gone(
    r: Action, peaks: tuple[int, ...], held: tuple[int, int]
) -> None:
    """r is saved, then s, then r is let go of; x is there all the time."""
    codes = {"codec_bytes": {"int8": (0, 0, 0, 8, 0)}, "codec_seconds": {"int8": (0.0, 0.0, 0.0, 0.1, 0.0)}}
    view = chain(**codes, forward_values=(3, 4, 3), forward_peaks=peaks)
    (point,) = (p for p in timeline(view, [{"x": "store", "r": r, "s": "store"}]) if p.name == "forward:0")
    assert (point.kept, point.working) == held


def test_an_op_has_working_memory_of_its_own() -> None:
    view = chain(asked_values=((4, 3),), asked_bytes=((0, 0),), op_working_bytes=(0, 7, 500, 0))
    assert backward_of(view, "recompute", "recompute") == (10, 200 + 30 + 500, 0)


def test_interpolation() -> None:
    profile = llama_profile(blocks=2, lengths=(100, 300))
    low, high = (view_at(profile, tokens) for tokens in (100, 300))
    middle = view_at(profile, 151)
    for before, between, after in zip(
        low.classes[0].value_bytes, middle.classes[0].value_bytes, high.classes[0].value_bytes, strict=True
    ):
        assert between == -(-(before * 149 + after * 51) // 200)
    assert middle.store.step_seconds == pytest.approx(
        (low.store.step_seconds * 149 + high.store.step_seconds * 51) / 200
    )
    assert view_at(profile, 7).classes == low.classes
    assert view_at(profile, 100).classes[0].value_bytes == profile.points[0].classes[0].value_bytes
    assert high.outside == profile.points[1].outside
    with pytest.raises(UsageError, match="301 are more"):
        view_at(profile, 301)
