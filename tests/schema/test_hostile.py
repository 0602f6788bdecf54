"""Files made to break the reader: each is one clear error, never a crash and never a wrong document."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from hilore_plan.errors import FileError
from hilore_plan.schema import io
from hilore_plan.schema.record import Record

TEXTS = {
    "empty": ("", "not a valid document"),
    "cut off": ('{"schema": "hilore.plan/1", "entr', "line 1"),
    "a list": ("[]", "not a JSON object"),
    "a string": ('"hilore.plan/1"', "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "deep lists": ("[" * 200_000, "nested too deeply"),
    "deep objects": ('{"a":' * 200_000, "nested too deeply"),
    "NaN": ('{"schema": NaN}', "NaN"),
    "infinity": ('{"schema": -Infinity}', "Infinity"),
    "overflow": ('{"schema": 1e999}', "too large"),
    "huge integer": ('{"schema": ' + "9" * 10_000 + "}", "too long"),
    "key twice": ('{"schema": "hilore.plan/1", "schema": "hilore.plan/1"}', "there twice"),
    "key twice inside": ('{"a": {"b": 1, "b": 2}}', "there twice"),
    "byte order mark": ('\ufeff{"schema": "hilore.plan/1"}', "not a valid document"),
    "two documents": ("{}{}", "line 1"),
    "comment": ("// plan\n{}", "line 1"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_document(name: str, tmp_path: Path) -> None:
    text, expected = TEXTS[name]
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    for load in (io.load_document, io.load_plan, io.load_profile, io.load_bench):
        with pytest.raises(FileError, match=expected) as caught:
            load(tmp_path / "a.json")
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 200 + len(str(tmp_path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(FileError, match="is not text"):
        io.load_document(tmp_path / "a.json")


def test_a_folder_is_no_document(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        io.load_document(tmp_path)


def _set(*path: str | int, value: object) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value

    return edit


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


PLANS = {
    "number as text": (_set("budget", "limit_bytes", value="5"), "budget.limit_bytes"),
    "number as truth": (_set("budget", "limit_bytes", value=True), "budget.limit_bytes"),
    "fraction of a byte": (_set("budget", "limit_bytes", value=1.5), "budget.limit_bytes"),
    "text as number": (_set("created", value=5), "created"),
    "null": (_set("model", value=None), "model"),
    "deep value": (_set("model", value=_nested(500)), "recursion limit"),
    "negative bytes": (_set("budget", "limit_bytes", value=-1), "budget.limit_bytes is negative"),
    "negative peak": (_set("entries", 0, "gc", "peak_bytes", value=-1), "entries[0].gc.peak_bytes"),
    "negative block": (_set("entries", 0, "groups", 0, "blocks", 0, value=-1), "negative"),
    "negative seconds": (_set("entries", 1, "predicted", "step_seconds", value=-0.5), "entries[1].predicted"),
    "no entries": (_set("entries", value=[]), "entries"),
    "entries that descend": (_set("entries", 0, "tokens_up_to", value=4096), "ascending"),
    "unknown action": (_set("entries", 0, "groups", 0, "actions", "mlp.gate_proj", value="forget"), "mlp.gate_proj"),
    "block twice": (_set("entries", 1, "groups", 1, "blocks", value=[1]), "entries[1].groups"),
    "block missing": (_set("entries", 1, "groups", 1, "blocks", value=[]), "entries[1].groups"),
    "block of no model": (_set("classes", 0, "blocks", value=[0, 1, 99]), "among the 3"),
    "class of no model": (_set("entries", 0, "groups", 0, "class_name", value="Other"), "Other"),
}
PROFILES = {
    "negative bytes": (_set("points", 0, "classes", 0, "value_bytes", 0, value=-1), "negative"),
    "negative parameters": (_set("points", 1, "outside", "parameter_bytes", value=-8), "points[1].outside"),
    "value that is not there": (_set("classes", 0, "ops", 0, "inputs", value=[99]), "classes[0].ops[0]"),
    "stage that is not there": (_set("classes", 0, "values", 2, "slot_stages", value=[7]), "slot_stages"),
    "too few measures": (_set("points", 0, "classes", 0, "op_seconds", value=[0.1]), "points[0].classes[0].op_seconds"),
    "class without measures": (_set("points", 0, "classes", value=[]), "points[0].classes"),
    "points that descend": (_set("points", 0, "tokens", value=4096), "ascending"),
    "no points": (_set("points", value=[]), "points"),
    "no tokens": (_set("points", 0, "tokens", value=0), "points[0].tokens"),
    "block in two classes": (_set("classes", 0, "blocks", value=[0, 0, 1]), "twice"),
    "gradients of other blocks": (
        _set("points", 0, "outside", "block_gradient_bytes", value=[1]),
        "block_gradient_bytes",
    ),
}
CALIBRATED = {
    "unit that is not there": (_set("risk", "units", 0, 0, "unit", value="mlp.up_proj"), "risk.units[0][0].unit"),
    "codec that is not there": (_set("risk", "units", 0, 1, "codec", value="int3"), "risk.units[0][1].codec"),
    "risk of other blocks": (_set("risk", "units", 0, 0, "local", value=[1e-6]), "risk.units[0][0].local"),
    "spread of other blocks": (_set("risk", "units", 0, 0, "spread", value=[0.1]), "risk.units[0][0].spread"),
    "risk twice": (_set("risk", "units", 0, 1, "unit", value="mlp.gate_proj"), "second time"),
    "risk of other classes": (_set("risk", "units", value=[]), "risk.units has 0"),
    "negative risk": (_set("risk", "units", 0, 0, "propagated", 1, value=-1e-9), "negative"),
    "no exposures": (_set("risk", "exposures", "values", value=[]), "risk.exposures.values"),
    "too few bytes in a codec": (_set("points", 0, "classes", 0, "codec_bytes", "int8", value=[1]), "codec_bytes.int8"),
    "negative bytes in a codec": (_set("points", 0, "classes", 0, "codec_bytes", "int8", 4, value=-1), "int8[4]"),
    "codec without seconds": (_set("points", 0, "classes", 0, "codec_seconds", value={}), "codec_seconds"),
    "exact input that is none": (_set("classes", 0, "ops", 1, "exact_inputs", value=[0]), "exact_inputs"),
}
COMPRESSING = {
    "action without a codec": (_set("entries", 0, "groups", 0, "actions", "mlp.gate_proj", value="compress:"), "gate"),
    "exposures that descend": (_set("entries", 1, "exposure_up_to", value=0.0), "ascending"),
    "more often than always": (_set("entries", 1, "frequency", value=1.5), "frequency"),
    "negative price": (_set("risk", "price", value=-1.0), "risk.price"),
}
SAMPLES = (
    (samples.plan, PLANS),
    (samples.profile, PROFILES),
    (samples.calibrated_profile, CALIBRATED),
    (samples.compressing_plan, COMPRESSING),
)
CASES = [*((make, name, *case) for make, cases in SAMPLES for name, case in cases.items())]


@pytest.mark.parametrize(("make", "name", "edit", "expected"), CASES, ids=[f"{c[0].__name__}-{c[1]}" for c in CASES])
def test_documents_that_make_no_sense(
    make: Callable[[], Record], name: str, edit: Callable[[Any], None], expected: str, tmp_path: Path
) -> None:
    data = make().model_dump(mode="json", by_alias=True)
    edit(data)
    (tmp_path / "a.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FileError) as caught:
        io.load_document(tmp_path / "a.json")
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.lists(st.integers(0, 20), min_size=1, max_size=6), value=JSON)
def test_any_field_replaced_by_anything_is_read_or_refused(
    path: list[int], value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data: Any = samples.plan().model_dump(mode="json", by_alias=True)
    _set(*_some_path(data, path), value=value)(data)
    file = tmp_path_factory.mktemp("any") / "a.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with suppress(FileError):
        io.load_document(file)


def _some_path(data: Any, choices: list[int]) -> list[str | int]:
    found: list[str | int] = []
    for choice in choices:
        keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
        if not keys:
            break
        found.append(keys[choice % len(keys)])
        data = data[found[-1]]
    return found
