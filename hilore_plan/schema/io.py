"""Reads and writes the documents: strict on the way in, atomic on the way out.

A file is refused with one line that names the file and the field. What is accepted has the right types, no field that
we do not know (unless a newer revision wrote it), finite numbers, and parts that fit each other.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hilore_plan.errors import FileError
from hilore_plan.schema import bench, checks, plan, profile
from hilore_plan.schema.record import Record
from hilore_plan.schema.strict_json import JsonError, parse
from hilore_plan.schema.text import document_text
from hilore_plan.schema.upgrade import upgraded

Document = profile.Profile | plan.Plan | bench.Bench
AnyRecord = TypeVar("AnyRecord", bound=Record)


class NewerRevisionWarning(UserWarning):
    """A file from a newer hilore has fields that this one ignores."""


@dataclass(frozen=True)
class Kind:
    """One kind of document: the record that reads it, and the newest version and revision that we know."""

    name: str
    record: type[Record]
    version: int
    revision: int
    makes: str


def _kind(record: type[Record], schema: str, revision: int, makes: str) -> Kind:
    name, version = schema.split("/")
    return Kind(name, record, int(version), revision, makes)


PROFILE = _kind(profile.Profile, profile.SCHEMA, profile.REVISION, "hilore profile MODEL -o FILE")
PLAN = _kind(plan.Plan, plan.SCHEMA, plan.REVISION, "hilore plan PROFILE --budget 1.1x-gc -o FILE")
BENCH = _kind(bench.Bench, bench.SCHEMA, bench.REVISION, "hilore bench PLAN --json FILE")
KINDS = {kind.name: kind for kind in (PROFILE, PLAN, BENCH)}


def load_profile(path: str | os.PathLike[str]) -> profile.Profile:
    """Read a profile.

    Raises:
        FileError: if the file is missing, corrupt, of another kind, or from a newer hilore.
    """
    document = _load(Path(path), profile.Profile, PROFILE)
    checks.check_profile(document, str(path))
    return document


def load_plan(path: str | os.PathLike[str]) -> plan.Plan:
    """Read a plan.

    Raises:
        FileError: if the file is missing, corrupt, of another kind, or from a newer hilore.
    """
    document = _load(Path(path), plan.Plan, PLAN)
    checks.check_plan(document, str(path))
    return document


def load_bench(path: str | os.PathLike[str]) -> bench.Bench:
    """Read what `hilore bench --json` wrote.

    Raises:
        FileError: if the file is missing, corrupt, of another kind, or from a newer hilore.
    """
    return _load(Path(path), bench.Bench, BENCH)


def load_document(path: str | os.PathLike[str]) -> Document:
    """Read a profile, plan or bench, whichever the file's `schema` says it is.

    Raises:
        FileError: if it is none of them, missing, corrupt, or from a newer hilore.
    """
    kind, _ = _schema_of(_read(Path(path)), Path(path))
    if kind is PROFILE:
        return load_profile(path)
    return load_plan(path) if kind is PLAN else load_bench(path)


def save(document: Record, path: str | os.PathLike[str]) -> None:
    """Write a document whole or not at all: into a temporary file beside it, which then takes its place.

    Raises:
        FileError: if the file cannot be written there.
    """
    target = Path(path)
    text = document_text(document)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, text)
    except OSError as error:
        raise _unwritable(target, error) from error


def check_writable(path: str | os.PathLike[str], *, force: bool) -> None:
    """Find out, before the hours of work whose result goes there, whether a file can be written.

    Raises:
        FileError: if it exists and `force` is not set, or if it cannot be written.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise FileError(f"{target} is a folder", hint=f"name a file in it: {target / 'FILE.json'}")
        if target.exists() and not force:
            raise FileError(f"{target} exists already", hint="--force overwrites it, or choose another name with -o")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise _unwritable(target, error) from error


def _replace(target: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files that nobody else may read
        os.replace(name, target)
    except BaseException:  # Ctrl-C included: nothing half-written stays behind
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _unwritable(target: Path, error: OSError) -> FileError:
    return FileError(
        f"cannot write {target}: {error.strerror or error}",
        hint="choose a place where you may write, with -o",
    )


def _load(path: Path, record: type[AnyRecord], wanted: Kind) -> AnyRecord:
    data = _read(path)
    kind, version = _schema_of(data, path)
    if kind is not wanted:
        raise FileError(
            f"{path} is a {_short(kind)}, but a {_short(wanted)} is needed here",
            hint=f"a {_short(wanted)} is made by: {wanted.makes}",
        )
    return _validated(upgraded(data, kind.name, version, kind.version), path, record, kind)


def _short(kind: Kind) -> str:
    return kind.name.removeprefix("hilore.")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}", hint="check its name and folder") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}", hint="give a file that hilore has written") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text", hint="give a JSON file that hilore has written") from error
    try:
        return parse(text)
    except JsonError as error:
        raise FileError(f"{path} is not a valid document: {error}", hint="it is corrupt: make it anew") from error


def _schema_of(data: dict[str, Any], path: Path) -> tuple[Kind, int]:
    schema = data.get("schema")
    found = re.fullmatch(r"(hilore\.\w+)/([1-9]\d{0,8})", schema) if isinstance(schema, str) else None
    kind = KINDS.get(found[1]) if found else None
    if found is None or kind is None:
        shown = "no schema" if schema is None else f"the unknown schema {str(schema)[:40]!r}"
        raise FileError(
            f"{path} has {shown}", hint=f"hilore reads {', '.join(f'{k.name}/{k.version}' for k in KINDS.values())}"
        )
    version = int(found[2])
    if version > kind.version:
        raise FileError(
            f"{path} is a {kind.name}/{version}, but this hilore reads up to {kind.name}/{kind.version}",
            hint=f"it needs a hilore that reads {kind.name}/{version}: pip install --upgrade hilore-plan",
        )
    return kind, version


def _validated(data: dict[str, Any], path: Path, record: type[AnyRecord], kind: Kind) -> AnyRecord:
    try:
        return record.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        unknown = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
        revision = data.get("revision")
        if not unknown or not isinstance(revision, int) or revision <= kind.revision:
            raise _invalid(error, path) from error
    for location in unknown:
        _delete(data, location)
    names = sorted({_dotted(location) for location in unknown})
    warnings.warn(
        f"{path} was written by a newer hilore (revision {revision}, this one knows {kind.revision}); "
        f"ignored: {', '.join(names)}",
        NewerRevisionWarning,
        stacklevel=4,
    )
    try:
        return record.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise _invalid(error, path) from error


def _delete(data: Any, location: tuple[int | str, ...]) -> None:
    for part in location[:-1]:
        data = data[part]
    del data[location[-1]]


def _dotted(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _invalid(error: ValidationError, path: Path) -> FileError:
    first, count = error.errors()[0], error.error_count()
    reason = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    more = f" (and {count - 1} more)" if count > 1 else ""
    return FileError(
        f"{path} is not valid at {_dotted(first['loc']) or 'the top'}: {reason}{more}",
        hint="it was edited or is corrupt: make it anew, or correct that field",
    )
