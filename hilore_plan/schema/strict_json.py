"""JSON as it is defined, no more: one object, no key twice, finite numbers, and no depth that breaks the reader."""

from __future__ import annotations

import json
import math
from typing import Any


class JsonError(ValueError):
    """Text that is no document of ours; the message says where and why."""


def parse(text: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
        JsonError: for anything else, in one line.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise JsonError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except JsonError:
        raise
    except ValueError as error:  # an integer of more digits than Python is willing to read
        raise JsonError("it has a number that is too long") from error
    if not isinstance(data, dict):
        raise JsonError("it is not a JSON object")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise JsonError(f"the key {key[:40]!r} is there twice")
        found[key] = value
    return found


def _refuse(constant: str) -> float:
    raise JsonError(f"{constant} is not a number that JSON knows")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JsonError(f"the number {digits[:20]} is too large")
    return value
