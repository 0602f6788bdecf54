"""Files spoilt at random: one clear error, or exactly what the file says; never a crash, never another document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corruption import PLANS, PROFILES, at, damaged, data_of, edited, paths, with_key_twice, with_value, without
from hypothesis import given, settings
from hypothesis import strategies as st

from hilore_plan.errors import FileError
from hilore_plan.schema import io
from hilore_plan.schema.record import Record

DOCUMENTS = {**PLANS, **PROFILES}
any_document = pytest.mark.parametrize("make", DOCUMENTS.values(), ids=DOCUMENTS)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where spoilt documents go."""
    return tmp_path_factory.mktemp("spoilt") / "a.json"


def load(file: Path, content: str | bytes) -> Record | None:
    """The document, if it is one; if not, the error is one line that names the file."""
    file.write_bytes(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    try:
        return io.load_document(file)
    except FileError as error:
        refusal = error
    assert str(file) in refusal.message
    assert "\n" not in refusal.message
    assert len(refusal.message) < 400 + len(str(file))
    assert refusal.hint
    return None


@settings(max_examples=300)
@given(content=damaged(DOCUMENTS))
def test_flipped_and_missing_bytes(content: bytes, file: Path) -> None:
    document = load(file, content)
    if document is not None:
        assert agrees(document.model_dump(mode="json", by_alias=True), json.loads(content))


@settings(max_examples=500)
@given(edit=edited(DOCUMENTS))
def test_any_value_replaced(edit: tuple[str, tuple[str | int, ...], str], file: Path) -> None:
    document = load(file, edit[0])
    if document is not None:
        assert agrees(document.model_dump(mode="json", by_alias=True), json.loads(edit[0]))


def agrees(loaded: Any, written: Any) -> bool:
    """Whether a loaded document says what the file says; what the file leaves out has its default."""
    if isinstance(written, dict):
        return all(key in loaded and agrees(loaded[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(loaded) == len(written) and all(map(agrees, loaded, written))
    if isinstance(loaded, float):
        written = float(written)
    return bool(loaded == written) and isinstance(loaded, bool) == isinstance(written, bool)


@any_document
def test_numbers_out_of_all_bounds_are_refused_wherever_they_stand(make: Any, file: Path) -> None:
    data = data_of(make)
    numbers = [path for path in paths(data) if type(at(data, path)) in (int, float)]
    assert len(numbers) > 20
    for path in numbers:
        for value in ("NaN", "1e999", "-1", "-1.5", "1e300", "1" + "0" * 101, "1" + "0" * 400):
            assert load(file, with_value(data, path, value)) is None, (path, value)


@any_document
def test_keys_that_stand_twice_or_that_nobody_knows_are_refused_wherever_they_stand(make: Any, file: Path) -> None:
    data = data_of(make)
    for path in paths(data):
        if isinstance(path[-1], str):
            assert load(file, with_key_twice(data, path)) is None, path
            known = at(data, path[:-1])
            if "actions" not in path and "parameters" not in path and not any("codec_" in str(key) for key in path):
                copy = json.loads(json.dumps(data))
                at(copy, path[:-1])["colour"] = "red"
                assert load(file, json.dumps(copy)) is None, (path, known)


@any_document
def test_what_is_left_out_is_refused_or_has_its_default(make: Any, file: Path) -> None:
    data = data_of(make)
    for path in paths(data):
        document = load(file, without(data, path))
        if document is not None:
            assert _may_be_left_out(document, data, path), path


def _may_be_left_out(document: Record, data: Any, path: tuple[str | int, ...]) -> bool:
    """Fields with a default, and elements of lists whose length nothing else says."""
    if isinstance(path[-1], int):
        return True
    owner: Any = document
    for key in path[:-1]:
        owner = owner[key] if isinstance(owner, (tuple, dict)) else getattr(owner, str(key))
    return isinstance(owner, dict) or not type(owner).model_fields[_field(owner, str(path[-1]))].is_required()


def _field(owner: Record, key: str) -> str:
    return next((name for name, info in type(owner).model_fields.items() if info.alias == key), key)


@settings(max_examples=100)
@given(data=st.data())
def test_lists_that_belong_together_keep_their_lengths(data: st.DataObject, file: Path) -> None:
    """An element too few or too many in a list of measures, of blocks or of values."""
    make = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    found = data_of(DOCUMENTS[make])
    lists = [path for path in paths(found) if isinstance(at(found, path), list) and at(found, path) and _bound(path)]
    path = data.draw(st.sampled_from(lists))
    copy = json.loads(json.dumps(found))
    values = at(copy, path)
    if data.draw(st.booleans()):
        values.pop(data.draw(st.integers(0, len(values) - 1)))
    else:
        values.append(values[-1])
    assert load(file, json.dumps(copy)) is None, path


def _bound(path: tuple[str | int, ...]) -> bool:
    """Whether the rest of the document says how long the list at a path is."""
    name = next(key for key in reversed(path) if isinstance(key, str))
    return (
        name
        in {
            *("blocks", "block_names", "classes", "values", "ops", "value_bytes", "op_seconds", "narrow_bytes"),
            *("narrow_seconds", "stage_working_bytes", "block_gradient_bytes", "local", "propagated", "int8", "int4"),
        }
        and "exposures" not in path
    )
