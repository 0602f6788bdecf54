"""What a process under `hilore apply` tells the launcher, and the environment variables by which it was told.

Every tool that the training command starts reads this file: it imports the standard library only.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hilore_plan.errors import HiloreError
    from hilore_plan.integrations.trl import Attachment
    from hilore_plan.integrations.trl_regroup import Regrouping
    from hilore_plan.integrations.verl import EngineAttachment
    from hilore_plan.schema.plan import Plan

PLAN = "HILORE_PLAN"
REPORTS = "HILORE_REPORT"
CHECK_EVERY = "HILORE_CHECK_EVERY"
REGROUP = "HILORE_REGROUP"


def child_report() -> ChildReport | None:
    """The report of this process, written once more at its end; None if no launcher has started it."""
    if REPORTS not in os.environ:
        return None
    report = ChildReport(Path(os.environ[REPORTS]))
    atexit.register(report.write)
    return report


def stop_on_error(trainer_class: Any, method: str, report: ChildReport) -> None:
    """Ends the process quietly on an error that hilore raises on purpose: the launcher is the one that shows it."""
    from hilore_plan.errors import HiloreError

    planned = getattr(trainer_class, method)

    @wraps(planned)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return planned(self, *args, **kwargs)
        except HiloreError as error:
            report.stop(error)

    setattr(trainer_class, method, guarded)


class ChildReport:
    """The file in which this process tells the launcher what became of the plan."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = os.getpid()
        self._name = f"report-{self._process}"
        self._error: HiloreError | None = None
        self._attachment: Attachment | None = None
        self._followed: Attachment | EngineAttachment | None = None
        self._regrouping: Regrouping | None = None
        self.trainers: list[str] = []
        self.other_methods: list[str] = []

    def attach(self, trainer_class: Any) -> None:
        """Puts the plan into a trainer class.

        Raises:
            HiloreError: the plan cannot be read, or the class has no method where it attaches.
        """
        from hilore_plan.integrations.trl import Attachment
        from hilore_plan.schema.io import load_plan

        if self._attachment is None:
            plan = load_plan(os.environ[PLAN])
            self._attachment = Attachment(plan, int(os.environ.get(CHECK_EVERY, "0")))
            self._regrouping = _regrouping(plan)
        self._attachment.add(trainer_class)
        if self._regrouping is not None:
            self.other_methods = [self._regrouping.add(trainer_class)]

    def follow(self, attachment: Attachment | EngineAttachment, target: str) -> None:
        """Reports on a plan that has been put into `target` already."""
        self._name += f"-{target}"  # beside what the same process reports of trainers
        self.trainers.append(target)
        self._followed = attachment
        self.write()

    def stop(self, error: HiloreError) -> None:
        """Leaves the error to the launcher, and the process."""
        self._error = error
        self.write()
        raise SystemExit(error.exit_code) from error

    def write(self) -> None:
        """Writes the report; a forked child has nothing of its own to say."""
        if os.getpid() != self._process:
            return
        target = self._directory / f"{self._name}.json"
        draft = target.with_suffix(".tmp")
        try:
            draft.write_text(json.dumps(self._content()), encoding="utf-8")
            draft.replace(target)
        except OSError as error:
            sys.stderr.write(f"hilore: cannot write the report: {error}\n")

    def _content(self) -> dict[str, Any]:
        attachment = self._attachment or self._followed
        reports = attachment.reports if attachment else []
        counts = self._regrouping.counts if self._regrouping else None
        return {
            "process": self._process,
            "rank": int(os.environ.get("RANK", "0")),
            "trainers": self.trainers,
            "error": _error_content(self._error),
            "runtimes": [report.as_dict() for report in reports],
            "regrouped": counts.as_dict() if counts else None,
            "text": "\n".join([*map(str, reports), *([str(counts)] if counts else [])]),
        }


def _regrouping(plan: Plan) -> Regrouping | None:
    """What `hilore apply` was asked to do with a step's rows; None: nothing."""
    if not (words := set(os.environ.get(REGROUP, "").split(",")) - {""}):
        return None
    from hilore_plan.integrations.trl_regroup import Regrouping, settings_for

    return Regrouping(settings_for(plan, regroup="rows" in words, leave_out_silent="silent" in words))


def _error_content(error: HiloreError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}
