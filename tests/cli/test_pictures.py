"""Pictures: that they are drawn, at the right size, and that what is in them is what the documents say."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compressed
import pandas as pd
import pytest
import samples
from command_line import Run

from hilore_plan.cli import charts, maps, pictures
from hilore_plan.errors import UsageError
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.io import save
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.plan import compressed as action_of
from hilore_plan.schema.profile import Mix, Profile, margin
from hilore_plan.tidy.points import entry_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

pytest.importorskip("matplotlib")


@pytest.fixture
def axes() -> Axes:
    from matplotlib.figure import Figure

    made: Axes = Figure().subplots()
    return made


def held_out(profile: Profile) -> Profile:
    assert profile.risk is not None
    mixes = (Mix(units=2, predicted=0.004, measured=0.005), Mix(units=9, predicted=0.03, measured=0.02))
    return profile.model_copy(update={"risk": profile.risk.model_copy(update={"held_out": mixes})})


def with_other_codec(plan: Plan) -> Plan:
    """The plan with a codec that somebody else has brought."""

    def renamed(entry: Entry) -> Entry:
        groups = [
            group.model_copy(
                update={"actions": {u: a.replace("int4", "theirs") for u, a in group.actions.items()}},
            )
            for group in entry.groups
        ]
        return entry.model_copy(update={"groups": tuple(groups)})

    return plan.model_copy(update={"entries": tuple(map(renamed, plan.entries))})


# a document, its profile, and the size of its picture in inches
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Profile] | None, tuple[float, float]]] = {
    "exact plan": (samples.plan, samples.profile, (14, 11)),
    "exact plan alone": (lambda: samples.plan(measured=False), None, (14, 6)),
    "compressed plan": (compressed.plan, compressed.profile, (14, 11)),
    "compressed plan alone": (compressed.plan, None, (14, 6)),
    "other people's codec": (lambda: with_other_codec(compressed.plan()), None, (14, 6)),
    "profile": (samples.profile, None, (9, 6)),
    "calibrated profile": (compressed.profile, None, (18, 11)),
    "profile with mixes": (lambda: held_out(compressed.profile()), None, (18, 11)),
    "bench": (samples.bench, None, (12, 4.5)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_drawn_at_its_size(case: str, tmp_path: Path) -> None:
    document, profile, inches = CASES[case]
    pictures.draw(document(), tmp_path / "a.png", profile=None if profile is None else profile())
    assert_drawn(tmp_path / "a.png", inches)


def assert_drawn(path: Path, inches: tuple[float, float]) -> None:
    from matplotlib.image import imread

    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert (width, height) == tuple(round(side * pictures.DOTS_PER_INCH) for side in inches)
    for rows in (slice(0, height // 2), slice(height // 2, height)):
        for columns in (slice(0, width // 2), slice(width // 2, width)):
            quarter = pixels[rows, columns, :3]
            assert quarter.min() < quarter.max(), (rows, columns)


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_the_ending_chooses_the_format(ending: str, tmp_path: Path) -> None:
    pictures.draw(samples.plan(), tmp_path / f"a.{ending}")
    assert (tmp_path / f"a.{ending}").read_bytes()[:5] == {"svg": b"<?xml", "pdf": b"%PDF-"}[ending]


def test_a_profile_of_other_blocks_is_refused(tmp_path: Path) -> None:
    other = samples.profile().model_copy(update={"block_names": ("a", "b", "c")})
    with pytest.raises(UsageError, match="not the plan's"):
        pictures.draw(samples.plan(), tmp_path / "a.png", profile=other)


def test_the_map_has_the_colour_of_each_action(axes: Axes) -> None:
    plan = compressed.plan()
    entry = plan.entries[0]
    maps.action_map(axes, plan, entry)
    (image,) = axes.images
    cells = image.get_array()
    assert cells is not None
    units = [label.get_text() for label in axes.get_yticklabels()]
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    colours = maps.action_colours(plan)
    for row, unit in enumerate(units):
        for block, chosen in actions.items():
            colour = "#" + "".join(f"{round(float(part) * 255):02x}" for part in cells[row][block])
            assert colour == colours[chosen[unit]], (unit, block)


def test_colours_are_those_of_the_actions_that_the_plan_uses() -> None:
    used = ["store", "cast", action_of("int8"), action_of("int4"), "recompute"]
    assert list(maps.action_colours(compressed.plan())) == used
    theirs = maps.action_colours(with_other_codec(compressed.plan()))
    assert list(theirs) == ["store", "cast", action_of("int8"), action_of("theirs"), "recompute"]
    assert len(set(theirs.values())) == len(theirs)


def test_blocks_without_units_leave_an_empty_map(axes: Axes) -> None:
    plan = samples.plan()
    bare = plan.entries[0].groups[0].model_copy(update={"actions": {}})
    entry = plan.entries[0].model_copy(update={"groups": (bare,)})
    maps.action_map(axes, plan.model_copy(update={"entries": (entry,)}), entry)
    assert len(axes.images) == 0


def test_the_risk_map_has_the_error_of_each_unit(axes: Axes) -> None:
    profile = compressed.profile()
    assert profile.risk is not None
    maps.risk_map(axes, profile, profile.risk, "int8")
    cells = axes.images[0].get_array()
    assert cells is not None
    cases = [unit for unit in profile.risk.units[0] if unit.codec == "int8"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [unit.unit for unit in cases]
    for row, unit in enumerate(cases):
        for block in range(3):
            rho = unit.local[block] + profile.risk.damping * unit.propagated[block]
            assert cells[row][block] == math.sqrt(rho * margin(unit.spread[block]))


def test_units_without_any_error_are_drawn(axes: Axes) -> None:
    profile = compressed.profile()
    assert profile.risk is not None
    nothing = {"local": (0.0,) * 3, "propagated": (0.0,) * 3}
    units = tuple(unit.model_copy(update=nothing) for unit in profile.risk.units[0])
    maps.risk_map(axes, profile, profile.risk.model_copy(update={"units": (units,)}), "int8")
    axes.figure.canvas.draw()


def test_bars_of_all_buckets_are_as_high_as_what_storing_takes(axes: Axes) -> None:
    plan, profile = compressed.plan(), compressed.profile()
    charts.bytes_by_action(axes, plan, profile, tokens_up_to=256)
    heights = [0.0] * len(compressed.BUCKETS)
    for container in axes.containers:
        for number, bar in enumerate(container):
            heights[number] += bar.get_height()
    (cls,) = view_at(profile, 256).classes
    whole = 3 * sum(cls.value_bytes[unit] for unit in cls.units) / charts.GIB
    assert heights == pytest.approx([whole] * len(heights))
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["0\n30%", "1.5\n50%", "any\n20%"]


def test_the_timeline_ends_at_the_peak_and_has_the_budget(axes: Axes) -> None:
    plan, profile = compressed.plan(), compressed.profile()
    entry = plan.entries[1]
    charts.peak_timeline(axes, plan, profile, entry)
    top = max(float(layer.get_paths()[0].vertices[:, 1].max()) for layer in axes.collections)
    assert top == pytest.approx(max(point.total for point in entry_timeline(entry, profile)) / charts.GIB)
    assert axes.lines[0].get_ydata()[0] == plan.budget.limit_bytes / charts.GIB
    assert "exposure 1.5" in axes.get_title()


def test_what_was_not_measured_has_no_second_bar(axes: Axes) -> None:
    charts.predicted_and_measured(axes, samples.plan(measured=False))
    assert len(axes.patches) == 2
    assert "nothing was measured" in axes.get_title()


def test_what_was_measured_stands_beside_its_prediction(axes: Axes) -> None:
    charts.predicted_and_measured(axes, samples.plan(measured=True))
    heights = [round(bar.get_height() * 1024) for bar in axes.patches]
    assert heights == [406, 406, 410, 410]


SWEEP = """\
budget,risk,peak_bytes,speed_vs_gc
1.0x-gc,0,,
1.1x-gc,0,2362232013,1.05
1.05x-gc,0,2254857830,1.02
1.1x-gc,0.015,2362232012,1.2
1.05x-gc,0.015,2254857830,1.1
1.1x-gc,0.3x-noise,2362232012,1.22
"""


def sweep_rows(how: str) -> list[dict[str, Any]]:
    if how == "csv":
        return list(csv.DictReader(io.StringIO(SWEEP)))
    return pd.read_csv(io.StringIO(SWEEP)).to_dict("records")


@pytest.mark.parametrize("how", ["csv", "pandas"])
def test_a_sweep_has_a_line_per_risk(how: str, axes: Axes) -> None:
    charts.budget_risk_speed(axes, sweep_rows(how))
    lines = {str(line.get_label()): line.get_xydata() for line in axes.lines}
    speeds = {name: list(points[:, 1]) for name, points in lines.items()}
    assert speeds == {"exact": [1.02, 1.05], "risk 0.015": [1.1, 1.2], "risk 0.3x-noise": [1.22]}
    assert [round(peak, 3) for peak in lines["exact"][:, 0]] == [2.1, 2.2]
    assert axes.get_xlabel().endswith("GiB")


def test_a_sweep_of_numbers_is_relative_to_gc(axes: Axes) -> None:
    rows: list[dict[str, Any]] = [
        {"risk": 0.0, "peak_bytes": 110, "speed_vs_gc": 1.1},
        {"risk": 0.05, "peak_bytes": 105.0, "speed_vs_gc": 1.2},
        {"risk": 0.05, "peak_bytes": None, "speed_vs_gc": None},
    ]
    charts.budget_risk_speed(axes, rows, gc_peak_bytes=100)
    found = {str(line.get_label()): tuple(line.get_xydata()[0]) for line in axes.lines}
    assert found == {"exact": (1.1, 1.1), "risk 0.05": (1.05, 1.2)}
    assert axes.get_xlabel() == "peak memory, x GC"


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ((), 5),
        (("--tokens", 100), 2),
        (("--tokens", 100, "--exposure", 0), 0),
        (("--exposure", 0.2), 4),
        (("--exposure", 9), 5),
    ],
)
def test_show_draws_the_chosen_entry(options: tuple[object, ...], number: int, hilore: Run, tmp_path: Path) -> None:
    plan = compressed.plan()
    save(plan, tmp_path / "plan.json")
    done = hilore("show", tmp_path / "plan.json", *options, "--plot", tmp_path / "shown.png")
    assert done.code == 0, done.err
    pictures.draw(plan, tmp_path / "drawn.png", entry=plan.entries[number])
    assert (tmp_path / "shown.png").read_bytes() == (tmp_path / "drawn.png").read_bytes()


def test_show_plots_a_calibrated_profile(hilore: Run, tmp_path: Path) -> None:
    save(compressed.profile(), tmp_path / "profile.json")
    done = hilore("show", tmp_path / "profile.json", "--plot", tmp_path / "a.png")
    assert done.code == 0, done.err
    assert_drawn(tmp_path / "a.png", (18, 11))


def test_entries_are_told_apart_by_the_gradients_that_they_find() -> None:
    plan = samples.distinguishing(samples.plan())
    names = [maps.entry_name(entry) for entry in plan.entries]
    assert names == ["256 tokens, no gradients", "256 tokens", "512 tokens, no gradients", "512 tokens"]
