"""The list of faults is complete: README.md names a test for each of them, and each of those tests is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FAULTS = 25
HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[int, str, str, str]]:
    """Number, fault, tests here and tests elsewhere."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return [(int(number), fault, here, elsewhere) for number, fault, here, elsewhere in ROW.findall(text)]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_fault_has_a_row() -> None:
    assert [number for number, *_ in rows()] == list(range(1, FAULTS + 1))


def test_every_row_names_tests_that_exist_and_carry_its_number() -> None:
    for number, fault, here, elsewhere in rows():
        names = NAME.findall(here)
        assert names, f"{number} ({fault}) names no test"
        for path, name in (*names, *NAME.findall(elsewhere)):
            assert name in names_in(HERE.parents[1] / path), f"{path}::{name}"
        assert all(name.startswith(f"test_{number:02}_") for _, name in names)


def test_every_test_of_a_fault_is_in_the_list() -> None:
    listed = {(path, name) for _, _, here, _ in rows() for path, name in NAME.findall(here)}
    there = {
        (f"tests/{path.parent.name}/{path.name}", name)
        for path in HERE.glob("test_*.py")
        if path.name != Path(__file__).name
        for name in names_in(path)
    }
    assert listed == there
