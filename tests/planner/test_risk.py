"""Plans with compression against brute force, and the rules that compression keeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from calibrated import calibrated, calibrated_profiles
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner.brute import every_column
from strategies import PRICES, Graph, llama_profile, outside, profile_of

from hilore_plan.planner import solve as solving
from hilore_plan.planner.asked import Wanted, buckets_of
from hilore_plan.planner.groups import grouped
from hilore_plan.planner.ilp import BlockSolver
from hilore_plan.planner.ilp_solver import scale_for
from hilore_plan.planner.inexact import InexactError, UnrecoverableError
from hilore_plan.planner.patterns import Column, Pattern, column, named, recompute_all
from hilore_plan.planner.risk import Price, exact_view, usable_view
from hilore_plan.planner.share import Curve, share
from hilore_plan.planner.simulate import assemble, simulate
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.schema.plan import Action
from hilore_plan.schema.profile import Point, Profile
from hilore_plan.schema.record import Mode

SMALL = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
UNITS = 4  # up to five actions each
MANY = 20_000
MODE = Mode(step_seconds=100.0, peak_bytes=1000)


def small_view(profile: Profile) -> View:
    view = view_at(profile, 1)
    assume(all(len(cls.units) <= UNITS for cls in view.classes))
    try:
        simulate(view, [named(view.class_at(i), recompute_all(view.class_at(i))) for i in range(len(view.blocks))])
    except UnrecoverableError:
        assume(False)
    return view


def all_plans(view: View) -> list[tuple[int, float, float]]:
    """Peak, seconds and risk of every choice that is not beaten by another one."""
    pools = [every_column(view, index) for index in range(len(view.classes))]
    assume(math.prod(len(pools[index]) for index in view.class_of) < MANY)
    price, plans = Price(view), set()
    for chosen in itertools.product(*(pools[index] for index in view.class_of)):
        simulation = assemble(view, [block.cost for block in chosen])
        risk = sum(price.risk(place, block) for place, block in enumerate(chosen))
        plans.add((simulation.peak_bytes, simulation.recompute_seconds, risk))
    return sorted(plans)


@SMALL
@given(calibrated_profiles(), st.integers(0, 100), st.sampled_from([0.0, 0.1, 1.0, 10.0]), st.booleans())
def test_equals_brute_force_at_a_price(profile: Profile, where: int, price: float, whole: bool) -> None:
    view = small_view(profile)
    plans = all_plans(view)
    exact = min(peak for peak, _, risk in plans if risk == 0)
    limit = exact + (plans[-1][0] - exact) * where // 100
    best = min(seconds + price * risk for peak, seconds, risk in plans if peak <= limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "WHOLE_UNITS", 80 if whole else 0)
        solved = solving.Planner("highs").solve(usable_view(view), limit, price)
    assert solved is not None
    assert solved.simulation.peak_bytes <= limit
    cost = solved.simulation.recompute_seconds + price * solved.risk
    assert cost >= best - 1e-9
    assert solved.bound <= best + 1e-6
    if whole:
        assert cost == pytest.approx(best, abs=1e-6)


@SMALL
@given(calibrated_profiles(), PRICES, PRICES, PRICES)
def test_program_of_a_block_costs_what_the_simulator_says(
    profile: Profile, kept: float, held: float, risk: float
) -> None:
    view = small_view(profile)
    for place, index in enumerate(view.class_of):
        block = BlockSolver(view, index, scale_for(1, 1000), "highs")
        pattern = block.priced(1.0, kept, [held] * (1 + view.classes[index].stages), risk, view.rho[place])

        def price(found: Column, place: int = place) -> float:
            sizes = kept * found.cost.kept_bytes + held * sum(found.cost.held_bytes)
            return Price(view, risk).seconds(place, found) + sizes

        cost = price(column(view, index, pattern))
        assert block.problem.objective.value() == pytest.approx(cost, abs=1e-5)
        assert cost == pytest.approx(min(map(price, every_column(view, index))), abs=1e-5)


@SMALL
@given(calibrated_profiles(), st.integers(0, 100), st.floats(0.0, 8.0))
def test_buckets_share_the_limit_and_know_how_good_they_are(profile: Profile, where: int, limit: float) -> None:
    view = small_view(profile)
    plans = all_plans(view)
    exact_peak = min(peak for peak, _, risk in plans if risk == 0)
    memory = exact_peak + (plans[-1][0] - exact_peak) * where // 100
    assert profile.risk is not None
    buckets = buckets_of(Wanted("", limit, profile.risk), 2)
    exact = solving.Planner("highs").solve(exact_view(view), memory)
    assert exact is not None
    shared = share(Curve(usable_view(view), memory, solving.Planner("highs"), exact), buckets, limit)
    squares = [bucket.weight * plan.risk for bucket, plan in zip(buckets, shared.plans, strict=True)]
    assert sum(squares) <= limit**2 * (1 + 1e-6)
    seconds = [b.frequency * plan.simulation.recompute_seconds for b, plan in zip(buckets, shared.plans, strict=True)]
    fitting = [(seconds, risk) for peak, seconds, risk in plans if peak <= memory]
    best = min(
        sum(bucket.frequency * took for bucket, (took, _) in zip(buckets, pair, strict=True))
        for pair in itertools.product(front(fitting), repeat=len(buckets))
        if sum(bucket.weight * risk for bucket, (_, risk) in zip(buckets, pair, strict=True)) <= limit**2 * (1 + 1e-9)
    )
    assert sum(seconds) >= best - 1e-6
    assert sum(seconds) - shared.gap * (view.store.step_seconds + sum(seconds)) <= best + 1e-6
    assert sum(seconds) <= exact.simulation.recompute_seconds + 1e-9


def front(plans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    best: list[tuple[float, float]] = []
    for seconds, risk in sorted(plans):
        if not best or risk < best[-1][1]:
            best.append((seconds, risk))
    return best


def chain_view(exact_inputs: bool = False, lse_slots: tuple[int, ...] = (0,)) -> View:
    """x -> q -> (out, lse) -> y: attention in small. q, out and y are slots; q and y may be compressed."""
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    q = graph.op("q", [x], 40, 1.0, 0)
    out, _ = graph.op_many("sdpa", [q], [("out", 30, (0,)), ("lse", 2, lse_slots)], 2.0)
    graph.op("y", [out], 20, 4.0, 0)
    cls = graph.block_class("Layer", [0], 1)
    if exact_inputs:
        guarded = cls.ops[1].model_copy(update={"exact_inputs": (q,)})
        cls = cls.model_copy(update={"ops": (cls.ops[0], guarded, *cls.ops[2:])})
    measure = graph.measure(1, 1).model_copy(
        update={"codec_bytes": {"int8": (0, 20, 15, 0, 10)}, "codec_seconds": {"int8": (0.0, 0.25, 0.25, 0.0, 0.25)}}
    )
    point = Point(
        tokens=1, batch=1, length=1, classes=(measure,), outside=outside(1), store=MODE, gc=MODE, recompute_scale=1.0
    )
    return view_at(profile_of([cls], [point], micro_batches=3), 1)


def pattern_of(view: View, **actions: Action) -> Pattern:
    cls = view.classes[0]
    return tuple(actions.get(cls.names[unit], "store") for unit in cls.units)


def test_a_compressed_value_is_kept_coded_and_decoded_while_needed() -> None:
    view = chain_view()
    cost = column(view, 0, pattern_of(view, q="compress:int8")).cost
    assert cost.kept_bytes == 10 + 20 + 30 + 2 + 20
    assert (cost.stages[0].kept, cost.stages[0].rebuilt) == (cost.kept_bytes, 40)
    assert cost.seconds == pytest.approx(3 * 0.25)


def test_inputs_and_what_has_no_codec_are_not_compressed() -> None:
    view = chain_view()
    with pytest.raises(UnrecoverableError, match="x cannot be compressed with int8"):
        column(view, 0, pattern_of(view, x="compress:int8"))
    with pytest.raises(UnrecoverableError, match="lse cannot be compressed with int8"):
        column(view, 0, pattern_of(view, lse="compress:int8"))
    with pytest.raises(UnrecoverableError, match="q cannot be compressed with int4"):
        column(view, 0, pattern_of(view, q="compress:int4"))


def test_where_anything_is_compressed_the_blocks_inputs_are_kept() -> None:
    """A micro-batch that turns out riskier than thought is rebuilt from them."""
    view = chain_view()
    column(view, 0, pattern_of(view, x="recompute"))
    with pytest.raises(InexactError, match="x has to be kept"):
        column(view, 0, pattern_of(view, x="recompute", y="compress:int8"))


def test_what_attention_keeps_wants_its_inputs_exact() -> None:
    view = chain_view(exact_inputs=True)
    with pytest.raises(InexactError, match="q has to be exact, for an output of sdpa is kept"):
        column(view, 0, pattern_of(view, q="compress:int8"))
    with pytest.raises(InexactError, match="q has to be exact"):
        column(view, 0, pattern_of(view, q="compress:int8", out="recompute"))
    with pytest.raises(InexactError, match="q has to be exact"):
        column(view, 0, pattern_of(view, q="compress:int8", lse="recompute", out="compress:int8"))
    column(view, 0, pattern_of(view, q="compress:int8", out="recompute", lse="recompute"))
    column(view, 0, pattern_of(view, out="compress:int8"))
    # q is rebuilt from x, which is exact
    column(view, 0, pattern_of(view, q="recompute", out="compress:int8"))


@pytest.mark.parametrize("kept_price", [0.01, 0.05, 0.2, 1.0])
def test_the_program_keeps_the_same_rules(kept_price: float) -> None:
    """At every price of bytes, its pattern costs what the best of all patterns that the simulator takes costs."""
    for view in (chain_view(exact_inputs=True), chain_view(), chain_view(exact_inputs=True, lse_slots=())):
        pattern = BlockSolver(view, 0, scale_for(1, 1000), "highs").priced(1.0, kept_price, [0.0, 0.0])
        costs = [c.cost.seconds + kept_price * c.cost.kept_bytes for c in every_column(view, 0)]
        found = column(view, 0, pattern).cost
        assert found.seconds + kept_price * found.kept_bytes == pytest.approx(min(costs))


def test_an_output_that_is_no_slot_wants_nothing() -> None:
    view = chain_view(exact_inputs=True, lse_slots=())
    column(view, 0, pattern_of(view, q="compress:int8", out="recompute"))


def test_inexactness_spreads_through_what_is_rebuilt() -> None:
    """y is rebuilt from a compressed value, and z wants y exact."""
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    a = graph.op("a", [x], 40, 1.0, 0)
    y = graph.op("y", [a], 40, 1.0, 0)
    graph.op("z", [y], 40, 1.0, 0)
    cls = graph.block_class("Layer", [0], 1)
    ops = (*cls.ops[:2], cls.ops[2].model_copy(update={"exact_inputs": (y,)}))
    measure = graph.measure(1, 1).model_copy(
        update={"codec_bytes": {"int8": (0, 20, 0, 0)}, "codec_seconds": {"int8": (0.0,) * 4}}
    )
    point = Point(
        tokens=1, batch=1, length=1, classes=(measure,), outside=outside(1), store=MODE, gc=MODE, recompute_scale=1.0
    )
    view = view_at(profile_of([cls.model_copy(update={"ops": ops})], [point]), 1)
    with pytest.raises(InexactError, match="y has to be exact, for an output of z is kept"):
        column(view, 0, pattern_of(view, a="compress:int8", y="recompute"))
    column(view, 0, pattern_of(view, a="compress:int8"))
    column(view, 0, pattern_of(view, a="compress:int8", y="recompute", z="recompute"))


def test_only_what_can_be_rebuilt_exactly_has_codecs() -> None:
    graph = Graph()
    x = graph.input("x", 10, keepable=True)
    noise = graph.op("noise", [x], 40, 1.0, recomputable=False)
    graph.op("y", [noise], 40, 1.0, 0)
    graph.op("mask", [x], 40, 1.0, 0, recomputable=False)
    graph.op("z", [x], 40, 1.0, 0)
    measure = graph.measure(1, 1).model_copy(
        update={"codec_bytes": {"int8": (5,) * 5}, "codec_seconds": {"int8": (0.0,) * 5}}
    )
    point = Point(
        tokens=1, batch=1, length=1, classes=(measure,), outside=outside(1), store=MODE, gc=MODE, recompute_scale=1.0
    )
    view = view_at(profile_of([graph.block_class("Layer", [0], 1)], [point]), 1)
    forms = dict(zip(view.classes[0].names, view.classes[0].forms, strict=True))
    assert [name for name, found in forms.items() if found] == ["z"]


def test_codecs_that_others_beat_are_not_considered() -> None:
    view = view_at(calibrated(llama_profile(blocks=3, lengths=(64,))), 64)
    actions = {form.action for forms in usable_view(view).classes[0].forms for form in forms}
    assert actions == {"cast", "compress:int8", "compress:int4"}  # int8 is as small as fp8, faster and less risky
    assert all(form.action == "cast" for forms in exact_view(view).classes[0].forms for form in forms)


def test_a_codec_that_was_not_calibrated_is_not_used() -> None:
    profile = calibrated(llama_profile(blocks=2, lengths=(64,)))
    assert profile.risk is not None
    units = tuple(tuple(unit for unit in units if unit.codec == "fp8_e4m3") for units in profile.risk.units)
    profile = profile.model_copy(update={"risk": profile.risk.model_copy(update={"units": units})})
    view = usable_view(view_at(profile, 64))
    actions = {form.action for forms in view.classes[0].forms for form in forms}
    assert actions == {"cast", "compress:fp8_e4m3"}


def test_a_group_has_the_least_risks_of_its_blocks() -> None:
    view = usable_view(view_at(calibrated(llama_profile(blocks=12, lengths=(64,))), 64))
    for most in (1, 3, 12):
        groups = grouped(view, most)
        assert len(groups.least) == most
        for place, group in enumerate(groups.of):
            assert all(view.rho[place][code] >= least for code, least in groups.least[group].items())
    assert grouped(view, 3).of == tuple(sorted(grouped(view, 3).of))  # neighbours are put together


def test_rho_is_local_and_damped_propagated_and_a_margin_for_what_is_uncertain() -> None:
    profile = calibrated(llama_profile(blocks=2, lengths=(64,)))
    assert profile.risk is not None
    unit = profile.risk.units[0][0]
    view = view_at(profile, 64)
    number = view.classes[0].names.index(unit.unit)
    for block in range(2):
        expected = unit.local[block] + profile.risk.damping * unit.propagated[block]
        expected *= 1 + 2 * math.sqrt(2) * unit.spread[block]
        assert expected > 0
        assert view.rho[block][number, f"compress:{unit.codec}"] == pytest.approx(expected)
