"""Documents on disk: what is written can be read, whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples

from hilore_plan.errors import FileError
from hilore_plan.schema import io
from hilore_plan.schema.plan import REVISION as PLAN_REVISION
from hilore_plan.schema.record import Record
from hilore_plan.schema.text import document_text
from hilore_plan.schema.upgrade import upgraded

DATA = Path(__file__).parent.parent / "data"
KINDS: dict[str, tuple[Callable[[], Record], Callable[[Path], Record]]] = {
    "profile": (samples.profile, io.load_profile),
    "plan": (samples.plan, io.load_plan),
    "bench": (samples.bench, io.load_bench),
    "calibrated profile": (samples.calibrated_profile, io.load_profile),
    "compressing plan": (samples.compressing_plan, io.load_plan),
}
NAMES = ("profile", "plan", "bench")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_read_back(kind: str, tmp_path: Path) -> None:
    make, load = KINDS[kind]
    io.save(make(), tmp_path / "a.json")
    assert load(tmp_path / "a.json") == make()
    assert io.load_document(tmp_path / "a.json") == make()


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_every_old_file_can_still_be_read(path: Path) -> None:
    assert io.load_document(path)


@pytest.mark.parametrize("kind", NAMES)
def test_there_is_an_old_file_of_every_version_and_revision(kind: str) -> None:
    current = io.KINDS[f"hilore.{kind}"]
    assert all((DATA / f"{kind}-{version}.json").exists() for version in range(1, current.version + 1))
    later = range(2, current.revision + 1)
    assert all((DATA / f"{kind}-{current.version}.{revision}.json").exists() for revision in later)


def test_what_an_older_revision_does_not_say_is_as_it_was() -> None:
    plan, profile = io.load_plan(DATA / "plan-1.json"), io.load_profile(DATA / "profile-1.json")
    assert (plan.revision, plan.risk) == (1, None)
    assert {(entry.exposure_up_to, entry.frequency, entry.weight) for entry in plan.entries} == {(None, 1.0, 1.0)}
    assert {(entry.predicted.error, entry.predicted.compressed_share) for entry in plan.entries} == {(0.0, 0.0)}
    assert (profile.revision, profile.codecs, profile.risk) == (1, (), None)
    assert not any(op.exact_inputs for cls in profile.classes for op in cls.ops)
    older = io.load_profile(DATA / "profile-1.2.json")
    measures = [measure for point in older.points for measure in point.classes]
    assert {(m.op_working_bytes, m.asked_values, m.asked_bytes) for m in measures} == {((), (), ())}
    before = io.load_profile(DATA / "profile-1.3.json")
    measures = [measure for point in before.points for measure in point.classes]
    assert {(m.asked_peaks, m.forward_values, m.forward_peaks) for m in measures} == {((), (), ())}
    alike = io.load_profile(DATA / "profile-1.4.json"), io.load_plan(DATA / "plan-1.2.json")
    assert {point.without_gradients for point in alike[0].points} == {None}
    assert {entry.gradients for entry in alike[1].entries} == {"live"}
    assert not alike[1].distinguishes_gradients


def test_the_newest_revision_tells_micro_batches_without_gradients_apart() -> None:
    profile, plan = io.load_profile(DATA / "profile-1.5.json"), io.load_plan(DATA / "plan-1.3.json")
    assert all(point.without_gradients for point in profile.points)
    assert [entry.gradients for entry in plan.entries] == ["none"] * 3 + ["live"] * 3
    assert plan.share(plan.entries[0]) == pytest.approx(plan.entries[0].frequency / 2)


@pytest.mark.parametrize(
    ("field", "wrong", "says"),
    [
        ("stage_working_bytes", [1], "without_gradients.classes.0..stage_working_bytes has 1 numbers"),
        ("asked_bytes", [[1024], [1024, 2048]], "one number for each"),
        ("asked_peaks", [[1024, 2048, 4096]], "asked_peaks does not have one number more"),
    ],
)
def test_what_a_class_needs_without_gradients_has_to_fit_it(
    field: str, wrong: object, says: str, tmp_path: Path
) -> None:
    data = json.loads((DATA / "profile-1.5.json").read_text())
    data["points"][0]["without_gradients"]["classes"][0][field] = wrong
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=says):
        io.load_profile(tmp_path / "a.json")


def test_every_class_has_measures_without_gradients_or_none_has(tmp_path: Path) -> None:
    data = json.loads((DATA / "profile-1.5.json").read_text())
    data["points"][0]["without_gradients"]["classes"] = []
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=r"without_gradients\.classes has 0 entries"):
        io.load_profile(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([3, 4, 5, 0, 1, 2], "not in ascending order"),
        ([0, 1, 2], "none for micro-batches that begin with gradients"),
        ([0, 0, 3], "not in ascending order"),
    ],
)
def test_entries_for_micro_batches_without_gradients_come_first_and_never_alone(
    order: list[int], says: str, tmp_path: Path
) -> None:
    data = json.loads((DATA / "plan-1.3.json").read_text())
    data["entries"] = [data["entries"][number] for number in order]
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=says):
        io.load_plan(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("field", "wrong", "says"),
    [
        ("op_working_bytes", [0], "op_working_bytes has 1 numbers"),
        ("asked_values", [[5, 4]], "asked_values has 1 stages"),
        ("asked_values", [[5, 4], [3]], "one number for each"),
        ("asked_values", [[5, 5], [3, 2]], "each once"),
        ("asked_values", [[5, 3], [3, 2]], "each once"),
        ("asked_values", [[5, 99], [3, 2]], "each once"),
        ("asked_bytes", [[1024], [1024, 2048]], "one number for each"),
        ("asked_peaks", [[1024, 2048], [1024, 2048, 4096]], "asked_peaks does not have one number more"),
        ("asked_peaks", [[1024, 2048, 4096]], "asked_peaks does not have one number more"),
        ("forward_values", [2, 3, 2, 4, 3, 5, 4, 2], "forward_values is not values"),
        ("forward_values", [2, 3, 2, 4, 3, 5, 4, 99], "forward_values is not values"),
        ("forward_values", [2, 3], "forward_peaks does not have one number more"),
        ("forward_peaks", [1024], "forward_peaks does not have one number more"),
    ],
)
def test_what_was_seen_of_a_class_has_to_fit_it(field: str, wrong: object, says: str, tmp_path: Path) -> None:
    data = json.loads((DATA / "profile-1.4.json").read_text())
    data["points"][0]["classes"][0][field] = wrong
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=says):
        io.load_profile(tmp_path / "a.json")


def test_the_same_document_is_the_same_text(tmp_path: Path) -> None:
    io.save(samples.plan(), tmp_path / "a.json")
    io.save(samples.plan(), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_files_are_json_with_lists_of_numbers_on_one_line() -> None:
    text = document_text(samples.profile())
    assert json.loads(text) == samples.profile().model_dump(mode="json", by_alias=True)
    assert text.startswith('{\n "schema": "hilore.profile/1",\n')
    assert '     "narrow_bytes": [0, 0, 1048576, 0, 0, 0],\n' in text


def test_a_written_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        io.save(samples.plan(), tmp_path / "a.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640


def test_folders_are_made(tmp_path: Path) -> None:
    io.save(samples.plan(), tmp_path / "new" / "folder" / "a.json")
    assert io.load_plan(tmp_path / "new" / "folder" / "a.json")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io.save(samples.plan(), tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((FileError, KeyboardInterrupt)):
        io.save(samples.plan(measured=False), tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    with pytest.raises(FileError, match="exists already"):
        io.check_writable(tmp_path / "a.json", force=False)
    io.check_writable(tmp_path / "a.json", force=True)


def test_places_that_cannot_be_written_are_found_early(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot write"):
        io.check_writable(tmp_path / "file" / "a.json", force=False)
    with pytest.raises(FileError, match="is a folder"):
        io.check_writable(tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_kind_of_file_says_what_makes_the_right_one(tmp_path: Path) -> None:
    io.save(samples.profile(), tmp_path / "a.json")
    with pytest.raises(FileError, match="is a profile, but a plan is needed here") as caught:
        io.load_plan(tmp_path / "a.json")
    assert "hilore plan PROFILE" in caught.value.hint


def _edited(tmp_path: Path, make: Callable[[], Record], edit: Callable[[dict[str, Any]], object]) -> Path:
    data = make().model_dump(mode="json", by_alias=True)
    edit(data)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_newer_schema_says_which_version_is_needed(tmp_path: Path) -> None:
    path = _edited(tmp_path, samples.plan, lambda data: data.update(schema="hilore.plan/2"))
    with pytest.raises(FileError, match=r"reads up to hilore\.plan/1") as caught:
        io.load_plan(path)
    assert "hilore.plan/2" in caught.value.hint


@pytest.mark.parametrize(
    "schema", [None, 7, "hilore.plan", "hilore.plan/0", "hilore.plan/-1", "hilore.nothing/1", "x/1"]
)
def test_an_unknown_schema_is_refused(schema: object, tmp_path: Path) -> None:
    path = _edited(tmp_path, samples.plan, lambda data: data.update(schema=schema))
    with pytest.raises(FileError, match="schema") as caught:
        io.load_document(path)
    assert "hilore.plan/1" in caught.value.hint


@pytest.mark.parametrize("revision", [0, 1, PLAN_REVISION])
def test_an_unknown_field_of_our_revision_or_older_is_an_error(revision: int, tmp_path: Path) -> None:
    path = _edited(tmp_path, samples.plan, lambda data: data.update(revision=revision, colour="red"))
    with pytest.raises(FileError, match="at colour: unknown field"):
        io.load_plan(path)


def test_unknown_fields_of_a_newer_revision_are_one_warning(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data.update(revision=PLAN_REVISION + 1, colour="red")
        data["entries"][1]["predicted"]["joules"] = 3

    path = _edited(tmp_path, samples.plan, edit)
    with pytest.warns(io.NewerRevisionWarning) as caught:
        plan = io.load_plan(path)
    assert len(caught) == 1
    assert "colour, entries[1].predicted.joules" in str(caught[0].message)
    assert plan.entries == samples.plan().entries


def test_a_newer_revision_does_not_excuse_other_faults(tmp_path: Path) -> None:
    path = _edited(
        tmp_path, samples.plan, lambda data: data.update(revision=PLAN_REVISION + 1, colour="red", created=5)
    )
    with pytest.warns(io.NewerRevisionWarning), pytest.raises(FileError, match="at created"):
        io.load_plan(path)


def test_upgrade_steps_run_in_order() -> None:
    steps = {"hilore.plan": {1: lambda data: {**data, "one": 1}, 2: lambda data: {**data, "two": data["one"] + 1}}}
    assert upgraded({"zero": 0}, "hilore.plan", 1, 3, steps) == {"zero": 0, "one": 1, "two": 2}
    assert upgraded({"one": 1}, "hilore.plan", 2, 3, steps) == {"one": 1, "two": 2}
    assert upgraded({}, "hilore.plan", 3, 3, steps) == {}
