"""Documents as text that a person can read and a diff can show: indented, but lists of plain values on one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hilore_plan.schema.record import Record


def document_text(document: Record) -> str:
    """A document as it is written to a file."""
    return dumps(document.model_dump(mode="json", by_alias=True))


def dumps(data: dict[str, Any]) -> str:
    """The data as JSON text, always the same for the same data."""
    return "".join(_pieces(data, "\n")) + "\n"


def _pieces(value: Any, newline: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield from _joined("{}", (_pair(key, item, newline + " ") for key, item in value.items()), newline)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        yield from _joined("[]", (_pieces(item, newline + " ") for item in value), newline)
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def _pair(key: str, value: Any, newline: str) -> Iterator[str]:
    yield json.dumps(key, ensure_ascii=False) + ": "
    yield from _pieces(value, newline)


def _joined(brackets: str, parts: Iterator[Iterator[str]], newline: str) -> Iterator[str]:
    separator = brackets[0]
    for part in parts:
        yield separator + newline + " "
        yield from part
        separator = ","
    yield newline + brackets[1]
