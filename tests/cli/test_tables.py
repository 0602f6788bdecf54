"""Tables at the widths that terminals have: names give way, numbers never lose a digit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import samples

from hilore_plan.cli import rows, ui
from hilore_plan.cli.tables import Column, Table, fitted

GOLDEN = Path(__file__).parent / "golden"
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
