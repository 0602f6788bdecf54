"""Tables as data: columns, rows of text, and how they are made to fit. What is in them is in `rows.py`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Literal

GAP = 2  # blanks between columns
LEAST_WIDTH = 8  # of a column that can be narrowed


@dataclass(frozen=True)
class Column:
    """One column. A name may be shortened in its middle, a series goes on in the next line, a number does neither."""

    title: str
    kind: Literal["number", "name", "series"] = "number"


@dataclass(frozen=True)
class Table:
    """A title, columns with rows of cells, and lines below them."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def widths(self) -> list[int]:
        """Characters that each column needs."""
        return [self._width(number, column) for number, column in enumerate(self.columns)]

    @property
    def width(self) -> int:
        """Characters that the whole table needs."""
        return sum(self.widths) + GAP * max(0, len(self.columns) - 1)

    def _width(self, number: int, column: Column) -> int:
        lines = [*column.title.split("\n"), *(row[number] for row in self.rows)]
        return max(len(line) for line in lines)


def fitted(table: Table, width: int) -> Table:
    """The table with names and series made narrower, the widest first, until it is at most `width` wide.

    Numbers keep their digits: where nothing else can give, the table stays wider than asked.
    """
    widths = table.widths
    for _ in range(table.width - width):
        can_give = [n for n, c in enumerate(table.columns) if c.kind != "number" and widths[n] > LEAST_WIDTH]
        if not can_give:
            break
        widths[max(can_give, key=lambda n: widths[n])] -= 1
    columns = table.columns
    rows = tuple(tuple(map(_narrowed, row, widths, columns)) for row in table.rows)
    return replace(table, rows=rows)


def _narrowed(text: str, width: int, column: Column) -> str:
    if len(text) <= width:
        return text
    if column.kind == "series":
        return "\n".join(textwrap.wrap(text, width))
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]
