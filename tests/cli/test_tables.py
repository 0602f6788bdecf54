"""Tables at the widths that terminals have: names give way, numbers never lose a digit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import samples

from hilore_plan.cli import risk_rows, rows, ui
from hilore_plan.cli.tables import Column, Table, fitted
from hilore_plan.planner.sweep import FrontierPoint
from hilore_plan.schema.plan import Plan

GOLDEN = Path(__file__).parent / "golden"
FRONTIER = (
    FrontierPoint("0.9x-gc", 400 * samples.MIB, "0.015"),
    FrontierPoint("1.1x-gc", 440 * samples.MIB, "0", 1.123, 1.166, 438 * samples.MIB, 0.0, 0.0, "memory"),
    FrontierPoint("1.1x-gc", 440 * samples.MIB, "0.3x-noise", 1.041, 1.258, 439 * samples.MIB, 0.0149, 812.5, "risk"),
)


def _unmeasured(plan: Plan) -> Plan:
    entries = tuple(entry.model_copy(update={"measured": None}) for entry in plan.entries)
    return plan.model_copy(update={"entries": entries})


TABLES: dict[str, Callable[[], list[Table]]] = {
    "profile": lambda: [
        rows.profile_steps(samples.profile()),
        rows.profile_units(samples.profile(), 0),
        rows.profile_outside(samples.profile()),
    ],
    "plan": lambda: [rows.plan_entries(samples.plan())],
    "plan_not_measured": lambda: [rows.plan_entries(samples.plan(measured=False))],
    "plan_units": lambda: rows.plan_units(samples.plan(), samples.plan().entries[1], samples.profile()),
    "plan_units_alone": lambda: rows.plan_units(samples.plan(), samples.plan().entries[1], None),
    "calibrated": lambda: [
        rows.profile_units(samples.calibrated_profile(), 0),
        risk_rows.profile_codecs(samples.calibrated_profile(), 0),
    ],
    "compressing": lambda: [rows.plan_entries(samples.compressing_plan())],
    "compressing_not_measured": lambda: [rows.plan_entries(_unmeasured(samples.compressing_plan()))],
    "compressing_units": lambda: rows.plan_units(
        samples.compressing_plan(), samples.compressing_plan().entries[1], samples.calibrated_profile()
    ),
    "distinguishing": lambda: [rows.plan_entries(samples.distinguishing(samples.plan()))],
    "distinguishing_units": lambda: rows.plan_units(
        samples.plan(), samples.distinguishing(samples.plan()).entries[0], None
    ),
    "distinguishing_compressing": lambda: [rows.plan_entries(samples.distinguishing(samples.compressing_plan()))],
    "frontier": lambda: [risk_rows.frontier(FRONTIER, "a workload")],
    "bench": lambda: [rows.bench_modes(samples.bench())],
}


def _rendered(tables: list[Table], width: int) -> str:
    text = "".join(ui.render(table, width) for table in tables)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", TABLES)
def test_tables_look_as_they_should(name: str, width: int) -> None:
    assert _rendered(TABLES[name](), width) == (GOLDEN / f"{name}-{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_terminal(name: str, width: int) -> None:
    assert all(fitted(table, width).width <= width for table in TABLES[name]())


@pytest.mark.parametrize("width", [20, 40, 60, 80])
@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_never_cut(name: str, width: int) -> None:
    wide, narrow = (" ".join(_rendered(TABLES[name](), w).split()) for w in (200, width))
    number = re.compile(r"\d[\d.]* (?:MiB|GiB|s|ms|us)\b")
    assert number.findall(narrow) == number.findall(wide)


def test_names_are_shortened_in_the_middle() -> None:
    table = Table("", (Column("unit", "name"), Column("bytes")), (("model.layers.7.self_attn.q_proj", "12345678"),))
    assert fitted(table, 24).rows == (("model.l…q_proj", "12345678"),)
    assert fitted(table, 5).rows == (("mode…roj", "12345678"),)


def test_a_series_goes_on_in_the_next_line() -> None:
    table = Table("", (Column("blocks", "series"), Column("bytes")), (("0-3, 5, 7-9, 11-20", "12345678"),))
    assert fitted(table, 20).rows == (("0-3, 5,\n7-9, 11-20", "12345678"),)
    assert "11-20" in ui.render(table, 20)


@pytest.mark.parametrize(
    ("numbers", "expected"), [((), ""), ((3,), "3"), ((2, 1, 0), "0-2"), ((0, 1, 3, 5, 6, 7), "0-1, 3, 5-7")]
)
def test_ranges(numbers: tuple[int, ...], expected: str) -> None:
    assert rows.ranges(numbers) == expected
