"""`launch`: an unchanged training command, with a plan in its trainer.

The command runs as a child. A private directory at the head of PYTHONPATH holds a `sitecustomize` that starts
`startup.begin` in every Python process of the command; each of them that imports a trainer of TRL's leaves a report in
the same directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from hilore_plan import errors
from hilore_plan.errors import FileError, HiloreError, UsageError
from hilore_plan.integrations.child_report import CHECK_EVERY, PLAN, REGROUP, REPORTS
from hilore_plan.integrations.trl_trainers import TRAINERS, listed
from hilore_plan.profiler.malloc import malloc_environment
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

RegroupWord: TypeAlias = Literal["rows", "silent"]
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_UNSEEN = "no-hilore"
_SITECUSTOMIZE = f'''\
"""Written by `hilore apply`: puts the plan into the trainer that this process imports."""
import os, sys

try:
    from hilore_plan.integrations import startup
except ImportError:
    with open(os.path.join(os.environ["{REPORTS}"], "{_UNSEEN}"), "w") as file:
        file.write(sys.executable)
else:
    startup.begin(os.path.dirname(os.path.abspath(__file__)))
'''


def launch(
    plan_path: str | os.PathLike[str],
    command: Sequence[str],
    report_path: Path | None = None,
    check_every: int = 0,
    regroup: Sequence[RegroupWord] = (),
) -> int:
    """Runs `command` under the plan and prints what the runtime reports, on stderr.

    Args:
        plan_path: a plan file.
        command: program and arguments.
        report_path: where the reports of all processes go as JSON, besides.
        check_every: the true gradient error of every so many steps is measured and logged; 0: of none.
        regroup: `rows`: a step's rows are regrouped; `silent`: those without signal are left out.

    Returns:
        The command's exit code; 128 + n if signal n ended it.

    Raises:
        UsageError: there is no such command.
        FileError: the plan cannot be read, or the report not be written.
        HiloreError: the plan couldn't be applied; what the training process found wrong.
    """
    path = Path(plan_path).resolve()
    plan = load_plan(path)
    check_command(command)
    with tempfile.TemporaryDirectory(prefix="hilore-") as directory:
        (Path(directory) / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        code = _run(command, {**os.environ, **child_environment(path, plan, directory, check_every, regroup)})
        reports = _read(Path(directory))
        unseen = Path(directory) / _UNSEEN
        without = unseen.read_text(encoding="utf-8") if unseen.is_file() else ""
    if report_path is not None:
        _save(reports, report_path)
    _raise_first_error(reports)
    sys.stderr.write(_summary(reports, without) + "\n")
    if regroup and not any(report.get("regrouped") for report in reports):
        sys.stderr.write("hilore: no rows were regrouped or left out: that is done in TRL's GRPOTrainer only\n")
    return code


def check_command(command: Sequence[str]) -> None:
    """Makes sure that the command can be started.

    Raises:
        UsageError: it cannot.
    """
    if not command:
        raise UsageError("no command to run", "hilore apply PLAN -- python train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"command not found: {command[0]}", "give a program and its arguments after --")


def child_environment(
    path: Path, plan: Plan, directory: str, check_every: int = 0, regroup: Sequence[RegroupWord] = ()
) -> dict[str, str]:
    """The variables that carry the plan into the command's processes; what the user set of malloc's stays."""
    before = os.environ.get("PYTHONPATH")
    malloc = malloc_environment() if plan.environment.device == "cpu" else {}
    return {
        PLAN: str(path),
        REPORTS: directory,
        CHECK_EVERY: str(check_every),
        REGROUP: ",".join(regroup),
        "PYTHONPATH": os.pathsep.join([directory, before] if before else [directory]),
        **{name: value for name, value in malloc.items() if name not in os.environ},
    }


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}", "is it a program?") from error
    with _forwarding(child):
        code = child.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hands signals on to the child while inside."""

    def forward(number: int, _: FrameType | None) -> None:
        if not (number in _KEYS and _in_foreground()):
            child.send_signal(number)

    numbers = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_KEYS = (signal.SIGINT, getattr(signal, "SIGQUIT", None))


def _in_foreground() -> bool:
    """Whether keys pressed in a terminal reach us, and so, without our help, the child as well."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _read(directory: Path) -> list[dict[str, Any]]:
    """What the command's processes reported, in the order of their ranks."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("report-*.json")]
    return sorted(found, key=lambda report: (report["rank"], report["process"]))


def _raise_first_error(reports: Sequence[dict[str, Any]]) -> None:
    failed = [report for report in reports if report["error"]]
    if failed:
        error = failed[0]["error"]
        kind = getattr(errors, error["type"], HiloreError)
        # what every rank has to say needs no rank
        lone = any(report["error"] != error for report in reports if report["rank"] != failed[0]["rank"])
        raise kind(f"rank {failed[0]['rank']}: {error['message']}" if lone else error["message"], error["hint"])


def _summary(reports: Sequence[dict[str, Any]], without: str) -> str:
    """What to print at the end: the first report of a plan that ran, or why there is none."""
    ran = [report for report in reports if report["runtimes"]]
    if ran:
        others = f"\n  and {len(ran) - 1} more processes like this one" if len(ran) > 1 else ""
        return str(ran[0]["text"]) + others
    if reports:
        trainers = listed(sorted({name for report in reports for name in report["trainers"]}))
        return f"hilore: the plan was not used: no {trainers} ran a training step to its end, or its process was killed"
    if without:
        return f"hilore: the plan was not used: {without} cannot import hilore_plan; install it for that Python"
    known = listed(list(TRAINERS.values()))
    return f"hilore: the plan was not used: the command never built a trainer that hilore knows (TRL's {known})"


def _save(reports: Sequence[dict[str, Any]], path: Path) -> None:
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.write_text(json.dumps({"processes": list(reports)}, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}", "give another --report") from error
