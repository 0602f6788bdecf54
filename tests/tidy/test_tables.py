"""The tables of plans and profiles: their columns, and that they say what the documents and the simulator say."""

from __future__ import annotations

import math
from pathlib import Path

import compressed
import pandas as pd
import pytest
import samples
from calibrated import calibrated
from tolerances import ADDED_UP

import hilore_plan
from hilore_plan.errors import UsageError
from hilore_plan.planner.simulate import Simulation, simulate
from hilore_plan.planner.timeline import point_names, view_at
from hilore_plan.schema.plan import Entry, Group, Plan, codec_of
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Mode

ROOT = Path(__file__).parents[2]

COLUMNS = {
    "units": {
        "entry": "int64",
        "block": "int64",
        "class_name": "string",
        "unit": "string",
        "decided": "bool",
        "action": "string",
        "codec": "string",
        "kept_bytes": "Int64",
        "whole_bytes": "Int64",
        "seconds": "float64",
        "rho": "float64",
    },
    "entries": {
        "entry": "int64",
        "tokens_up_to": "int64",
        "store_step_seconds": "float64",
        "store_peak_bytes": "int64",
        "gc_step_seconds": "float64",
        "gc_peak_bytes": "int64",
        "gradients": "string",
        "exposure_up_to": "float64",
        "frequency": "float64",
        "weight": "float64",
        "limit_bytes": "Int64",
        "predicted_peak_bytes": "Int64",
        "measured_peak_bytes": "Int64",
        "predicted_step_seconds": "float64",
        "measured_step_seconds": "float64",
        "recompute_seconds": "float64",
        "speed_vs_gc": "float64",
        "error": "float64",
        "compressed_share": "float64",
        "binding": "string",
    },
    "timeline": {
        "entry": "int64",
        "point": "string",
        "position": "int64",
        "fixed_bytes": "int64",
        "gradients_bytes": "int64",
        "kept_bytes": "int64",
        "rebuilt_bytes": "int64",
        "working_bytes": "int64",
        "total_bytes": "int64",
        "limit_bytes": "int64",
    },
    "risk": {
        "block": "int64",
        "class_name": "string",
        "unit": "string",
        "codec": "string",
        "local": "float64",
        "propagated": "float64",
        "spread": "float64",
        "rho": "float64",
    },
}
Pair = tuple[Plan, Profile]


def committed(name: str) -> Pair:
    file = f"{name}.json"
    return hilore_plan.load_plan(ROOT / "plans" / file), hilore_plan.load_profile(ROOT / "profiles" / file)


PAIRS = {
    "exact": lambda: (samples.plan(), samples.profile()),
    "compressed": lambda: (compressed.plan(), compressed.profile()),
    "qwen2-mini": lambda: committed("qwen2-mini"),
    "smollm2-135m": lambda: committed("smollm2-135m"),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param]()


def simulated(entry: Entry, profile: Profile) -> Simulation:
    view = view_at(profile, entry.tokens_up_to)
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    return simulate(view, [actions[block] for block in view.blocks])


def types_of(table: pd.DataFrame) -> dict[str, str]:
    return {name: str(dtype) for name, dtype in table.dtypes.items()}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_have_their_types_in_both_kinds_of_document(name: str) -> None:
    plan, profile = compressed.plan(), compressed.profile()
    documents = [hilore_plan.frames(plan, profile)]
    if name != "timeline":
        documents.append(hilore_plan.frames(profile))
    if name in ("units", "entries"):
        documents += [hilore_plan.frames(plan), hilore_plan.frames(samples.profile())]
    for tables in documents:
        assert types_of(getattr(tables, name)) == COLUMNS[name]


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_is_documented(name: str) -> None:
    text = getattr(type(hilore_plan.frames(samples.profile())), name).__doc__
    assert [column for column in COLUMNS[name] if column not in text] == []


def test_a_plan_that_decides_on_nothing_has_the_columns_all_the_same() -> None:
    plan = samples.plan()
    bare = Group(class_name="ExampleBlock", blocks=(0, 1, 2), actions={})
    entries = tuple(entry.model_copy(update={"groups": (bare,)}) for entry in plan.entries)
    units = hilore_plan.frames(plan.model_copy(update={"entries": entries})).units
    assert len(units) == 0
    assert types_of(units) == COLUMNS["units"]


def test_units_are_the_actions_of_the_plan(pair: Pair) -> None:
    plan, profile = pair
    for tables in (hilore_plan.frames(plan), hilore_plan.frames(plan, profile)):
        units = tables.units[tables.units.decided]
        found = [
            (row.entry, row.block, row.class_name, row.unit, row.action, None if pd.isna(row.codec) else row.codec)
            for row in units.itertuples()
        ]
        wanted = [
            (number, block, group.class_name, unit, action.split(":")[0], codec_of(action))
            for number, entry in enumerate(plan.entries)
            for group in entry.groups
            for block in group.blocks
            for unit, action in group.actions.items()
        ]
        assert sorted(found, key=str) == sorted(wanted, key=str)
        assert units.entry.is_monotonic_increasing


def test_kept_bytes_add_up_to_the_timelines_at_its_head(pair: Pair) -> None:
    tables = hilore_plan.frames(*pair)
    head = tables.timeline[tables.timeline.point == "head"].set_index("entry").kept_bytes
    assert tables.units.groupby("entry").kept_bytes.sum().to_dict() == head.to_dict()


def test_seconds_add_up_to_what_the_simulator_has(pair: Pair) -> None:
    plan, profile = pair
    seconds = hilore_plan.frames(plan, profile).units.groupby("entry").seconds.sum()
    for number, entry in enumerate(plan.entries):
        assert seconds[number] == pytest.approx(simulated(entry, profile).recompute_seconds, rel=ADDED_UP)


def test_rho_of_units_is_what_was_calibrated() -> None:
    tables = hilore_plan.frames(compressed.plan(), compressed.profile())
    coded = tables.units[tables.units.action == "compress"]
    assert len(coded) > 0
    both = coded.merge(tables.risk, on=["block", "class_name", "unit", "codec"], suffixes=("", "_calibrated"))
    assert len(both) == len(coded)
    assert (both.rho == both.rho_calibrated).all()
    assert (tables.units[tables.units.action != "compress"].rho == 0).all()


def test_rho_and_bytes_of_units_add_up_to_what_the_plan_predicts() -> None:
    profile = compressed.profile()
    plan = hilore_plan.solve_plan(profile, budget="1.05x-gc", risk="0.03")
    units = hilore_plan.frames(plan, profile).units
    kept = units[units.kept_bytes > 0]
    whole = kept.groupby("entry").whole_bytes.sum()
    coded = kept[kept.action == "compress"].groupby("entry").whole_bytes.sum()
    assert len(coded) > 0
    for number, entry in enumerate(plan.entries):
        error = units[units.entry == number].rho.sum() ** 0.5
        assert error == pytest.approx(entry.predicted.error, rel=ADDED_UP)
        assert coded.get(number, 0) / whole[number] == pytest.approx(entry.predicted.compressed_share, rel=ADDED_UP)


def test_rho_is_missing_where_nothing_was_calibrated() -> None:
    profile = compressed.profile().model_copy(update={"risk": None})
    units = hilore_plan.frames(compressed.plan(), profile).units
    assert units[units.action == "compress"].rho.isna().all()


def test_codecs_keep_less_and_casts_half() -> None:
    units = hilore_plan.frames(compressed.plan(), compressed.profile()).units
    share = (units.kept_bytes / units.whole_bytes).groupby([units.action, units.codec.fillna("")]).mean()
    assert share["cast", ""] == 0.5
    assert share["compress", "int8"] == pytest.approx((1 + 1 / 64) / 2)  # of two bytes, to within rounding up
    assert share["recompute", ""] == 0
    assert share["store", ""] == 1


def test_values_that_no_plan_decides_on_are_there_where_they_cost() -> None:
    plan, profile = committed("qwen2-mini")
    others = hilore_plan.frames(plan, profile).units.query("not decided")
    assert len(others) > 0
    assert ((others.kept_bytes > 0) | (others.seconds > 0)).all()
    assert hilore_plan.frames(plan).units.decided.all()


def test_what_is_alive_anyway_has_no_bytes() -> None:
    profile = samples.profile()
    (block_class,) = profile.classes
    shared = block_class.values[0].model_copy(update={"shared": True})
    values = (shared, *block_class.values[1:])
    profile = profile.model_copy(update={"classes": (block_class.model_copy(update={"values": values}),)})
    tables = hilore_plan.frames(samples.plan(), profile)
    assert (tables.units.query("unit == 'hidden_states'")[["kept_bytes", "whole_bytes"]] == 0).all(axis=None)
    head = tables.timeline[tables.timeline.point == "head"].kept_bytes
    assert tables.units.groupby("entry").kept_bytes.sum().tolist() == head.tolist()


def test_the_timeline_is_the_simulators(pair: Pair) -> None:
    plan, profile = pair
    timeline = hilore_plan.frames(plan, profile).timeline
    for number, entry in enumerate(plan.entries):
        points = timeline[timeline.entry == number]
        assert tuple(points.point) == point_names(view_at(profile, entry.tokens_up_to))
        assert points.position.tolist() == list(range(len(points)))
        simulation = simulated(entry, profile)
        assert points.total_bytes.max() == simulation.peak_bytes
        assert points.point[points.total_bytes.idxmax()] == simulation.binding
    parts = [f"{part}_bytes" for part in ("fixed", "gradients", "kept", "rebuilt", "working")]
    assert (timeline[parts].sum(axis=1) == timeline.total_bytes).all()
    assert (timeline.limit_bytes == plan.budget.limit_bytes).all()


def test_entries_say_what_the_plan_says(pair: Pair) -> None:
    plan, profile = pair
    entries = hilore_plan.frames(plan, profile).entries
    assert len(entries) == len(plan.entries)
    for row, entry in zip(entries.itertuples(), plan.entries, strict=True):
        assert (row.tokens_up_to, row.frequency, row.weight) == (entry.tokens_up_to, entry.frequency, entry.weight)
        assert row.exposure_up_to == (float("inf") if entry.exposure_up_to is None else entry.exposure_up_to)
        assert row.predicted_peak_bytes == entry.predicted.peak_bytes
        assert row.speed_vs_gc == entry.gc.step_seconds / entry.predicted.step_seconds
        assert (row.error, row.compressed_share) == (entry.predicted.error, entry.predicted.compressed_share)
        assert row.binding == entry.predicted.binding
        assert row.limit_bytes == plan.budget.limit_bytes
        assert Mode(step_seconds=row.gc_step_seconds, peak_bytes=row.gc_peak_bytes) == entry.gc
        assert pd.isna(row.measured_peak_bytes) == (entry.measured is None)


def test_measured_figures_are_there_where_the_plan_was_run() -> None:
    assert hilore_plan.frames(samples.plan(measured=False)).entries.measured_step_seconds.isna().all()
    plan = samples.plan(measured=True)
    measured = [entry.measured.peak_bytes for entry in plan.entries if entry.measured is not None]
    assert hilore_plan.frames(plan).entries.measured_peak_bytes.tolist() == measured


def test_a_step_that_takes_no_time_has_no_speed() -> None:
    plan = samples.plan()
    entries = tuple(
        entry.model_copy(update={"predicted": entry.predicted.model_copy(update={"step_seconds": 0.0})})
        for entry in plan.entries
    )
    assert hilore_plan.frames(plan.model_copy(update={"entries": entries})).entries.speed_vs_gc.isna().all()


def test_a_profile_has_the_choices_at_every_point() -> None:
    profile = compressed.profile()
    tables = hilore_plan.frames(profile)
    gate = tables.units.query("unit == 'mlp.gate_proj' and block == 1 and entry == 1")
    assert gate.action.tolist() == ["store", "compress", "compress", "compress", "recompute"]
    assert gate.codec.dropna().tolist() == ["int8", "fp8_e4m3", "int4"]
    assert gate.kept_bytes.tolist()[0] == gate.whole_bytes.tolist()[0] == profile.points[1].classes[0].value_bytes[4]
    upcast = tables.units.query("unit == 'input_layernorm.upcast' and block == 0 and entry == 0")
    assert upcast.action.tolist()[:2] == ["store", "cast"]
    assert set(tables.units.entry) == {0, 1}
    point, row = profile.points[0], tables.entries.iloc[0]
    assert (row.tokens_up_to, row.store_peak_bytes) == (point.tokens, point.store.peak_bytes)
    assert tables.entries.predicted_peak_bytes.isna().all()


def test_risk_is_what_was_calibrated() -> None:
    profile = compressed.profile()
    assert profile.risk is not None
    table = hilore_plan.frames(profile).risk
    assert len(table) == sum(len(unit.local) for units in profile.risk.units for unit in units)
    assert (table.spread > 0).any()
    mean = table.local + profile.risk.damping * table.propagated
    assert table.rho.to_numpy() == pytest.approx((mean * (1 + 2 * math.sqrt(2) * table.spread)).to_numpy())
    pd.testing.assert_frame_equal(table, hilore_plan.frames(compressed.plan(), profile).risk)


def test_risk_of_a_real_graph_is_in_the_table_of_units() -> None:
    profile = calibrated(hilore_plan.load_profile(ROOT / "profiles" / "smollm2-135m.json"))
    units = hilore_plan.frames(profile).units
    coded = units[(units.action == "compress") & (units.entry == 0)]
    assert len(coded) > 0
    assert coded.rho.notna().all()


def test_what_is_absent_says_why() -> None:
    plan, profile = samples.plan(), samples.profile()
    for table in ("timeline", "risk"):
        with pytest.raises(UsageError, match=r"needs the profile.*\n.*frames\(plan, profile\)"):
            getattr(hilore_plan.frames(plan), table)
    with pytest.raises(UsageError, match="a profile has no timeline"):
        _ = hilore_plan.frames(profile).timeline
    for tables in (hilore_plan.frames(profile), hilore_plan.frames(plan, profile)):
        with pytest.raises(UsageError, match=r"knows no risk.*\n.*--codecs"):
            _ = tables.risk


def test_other_documents_are_refused() -> None:
    profile = samples.profile()
    with pytest.raises(UsageError, match="not of a Bench"):
        hilore_plan.frames(samples.bench())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="two were given"):
        hilore_plan.frames(profile, profile)


def test_a_profile_that_is_not_the_plans_is_refused() -> None:
    plan, profile = samples.plan(), samples.profile()
    (block_class,) = profile.classes
    others = {
        "other names": {"block_names": ("a", "b", "c")},
        "are others": {"classes": (block_class.model_copy(update={"graph_hash": "ffff"}),)},
        "up to 256 tokens": {"points": profile.points[:1]},
    }
    for reason, change in others.items():
        with pytest.raises(UsageError, match=f"not the plan's.*{reason}"):
            hilore_plan.frames(plan, profile.model_copy(update=change))
