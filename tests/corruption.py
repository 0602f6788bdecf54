"""Documents spoilt at random: bytes, keys and values that no hilore would have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import samples
from hypothesis import strategies as st

from hilore_plan.schema.record import Record

PLANS: dict[str, Callable[[], Record]] = {"plan": samples.plan, "compressing plan": samples.compressing_plan}
PROFILES: dict[str, Callable[[], Record]] = {
    "profile": samples.profile,
    "calibrated profile": samples.calibrated_profile,
}
Path = tuple[str | int, ...]
Edit = Callable[[str], str]
_MARK = "@value@"

# values as they stand in the file, some of which only a text editor can put there
VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 30, "1" + "0" * 400, "1" + "0" * 5000, "1e308", "1e17"),
    *("-1", "-0.0", "0", "1", "7", "0.5", "1e-320", "9007199254740993", "18446744073709551616"),
    *(
        '""',
        '"x"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\n"',
        '"' + "x" * 3000 + '"',
        "null",
        "true",
        "[]",
        "{}",
        "[1]",
        '["a"]',
    ),
    *('{"a": 1}', "[" * 50 + "]" * 50, "[" * 100_000, '"store"', '"cast"', '"compress:int8"', '"compress:none"'),
)


def data_of(make: Callable[[], Record]) -> dict[str, Any]:
    """A document as JSON data."""
    return make().model_dump(mode="json", by_alias=True)


def paths(data: Any, at: Path = ()) -> Iterator[Path]:
    """Where everything in a document is, itself left out."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from paths(value, (*at, key))


def at(data: Any, path: Sequence[str | int]) -> Any:
    """What is at a path."""
    for key in path:
        data = data[key]
    return data


def with_value(data: dict[str, Any], path: Path, value: str) -> str:
    """The document's text with a value, as it stands in a file, in the place of another."""
    copy = json.loads(json.dumps(data))
    at(copy, path[:-1])[path[-1]] = _MARK
    return json.dumps(copy).replace(json.dumps(_MARK), value)


def with_key_twice(data: dict[str, Any], path: Path) -> str:
    """The document's text in which the last key of a path stands twice, with its own value."""
    copy = json.loads(json.dumps(data))
    at(copy, path[:-1])[_MARK] = at(copy, path)
    return json.dumps(copy).replace(json.dumps(_MARK), json.dumps(path[-1]))


def without(data: dict[str, Any], path: Path) -> str:
    """The document's text without a key or an element of a list."""
    copy = json.loads(json.dumps(data))
    del at(copy, path[:-1])[path[-1]]
    return json.dumps(copy)


@st.composite
def edited(draw: st.DrawFn, documents: dict[str, Callable[[], Record]]) -> tuple[str, Path, str]:
    """A document with one value replaced: its text, where, and by what."""
    data = data_of(documents[draw(st.sampled_from(sorted(documents)))])
    path = draw(st.sampled_from(sorted(paths(data), key=repr)))
    value = draw(st.sampled_from(VALUES))
    return with_value(data, path, value), path, value


@st.composite
def damaged(draw: st.DrawFn, documents: dict[str, Callable[[], Record]]) -> bytes:
    """A document's bytes, some of them flipped, or cut off."""
    content = bytearray(json.dumps(data_of(documents[draw(st.sampled_from(sorted(documents)))])).encode())
    place = st.integers(0, len(content) - 1)
    if draw(st.booleans()):
        return bytes(content[: draw(place)])
    for _ in range(draw(st.integers(1, 4))):
        content[draw(place)] ^= draw(st.integers(1, 255))
    return bytes(content)
