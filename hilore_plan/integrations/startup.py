"""What runs at the start of every Python process under `hilore apply`.

Waits for the import of TRL's trainer and puts the plan into it. Every tool that the training command starts runs this
too, so it imports the standard library only until then. The settings travel in the environment, which torchrun and
accelerate pass on to their workers.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hilore_plan.errors import HiloreError
    from hilore_plan.integrations.trl import Attachment

PLAN = "HILORE_PLAN"
REPORTS = "HILORE_REPORT"
CHECK_EVERY = "HILORE_CHECK_EVERY"
TRAINER_MODULE = "trl.trainer.grpo_trainer"


def begin(private: str) -> None:
    """Called by the private `sitecustomize`, whose directory is `private`."""
    sys.path[:] = [place for place in sys.path if place != private]
    sys.meta_path.insert(0, _Waiting(TRAINER_MODULE, _install))
    run_other_sitecustomize()


def run_other_sitecustomize() -> None:
    """Runs the `sitecustomize` that ours stands in front of, as Python would have, under its own name."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _Waiting(MetaPathFinder):
    """Lets the other finders find the module called `name`, and calls `then` once it has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Afterwards(spec.loader, self._then)
                return spec
        return None


class _Afterwards(Loader):
    """Another loader, with something to call after it has run the module."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _install() -> None:
    """Wraps the trainer; from here on this process reports."""
    report = _ChildReport(Path(os.environ[REPORTS]))
    report.write()
    from hilore_plan.errors import HiloreError
    from hilore_plan.integrations import trl

    try:
        report.attachment = trl.install(os.environ[PLAN], int(os.environ.get(CHECK_EVERY, "0")))
    except HiloreError as error:
        report.stop(error)
    _stop_on_error(trl.METHOD, report)
    atexit.register(report.write)


def _stop_on_error(method: str, report: _ChildReport) -> None:
    """Ends the process quietly on an error that hilore raises on purpose: the launcher is the one that shows it."""
    from hilore_plan.errors import HiloreError

    trainer = sys.modules[TRAINER_MODULE].GRPOTrainer
    planned = getattr(trainer, method)

    @wraps(planned)
    def guarded(self: Any, model: Any, inputs: Any) -> Any:
        try:
            return planned(self, model, inputs)
        except HiloreError as error:
            report.stop(error)

    setattr(trainer, method, guarded)


class _ChildReport:
    """The file in which this process tells the launcher what became of the plan."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = os.getpid()
        self._error: HiloreError | None = None
        self.attachment: Attachment | None = None

    def stop(self, error: HiloreError) -> None:
        """Leaves the error to the launcher, and the process."""
        self._error = error
        self.write()
        raise SystemExit(error.exit_code) from error

    def write(self) -> None:
        """Writes the report; a forked child has nothing of its own to say."""
        if os.getpid() != self._process:
            return
        target = self._directory / f"report-{self._process}.json"
        draft = target.with_suffix(".tmp")
        try:
            draft.write_text(json.dumps(self._content()), encoding="utf-8")
            draft.replace(target)
        except OSError as error:
            sys.stderr.write(f"hilore: cannot write the report: {error}\n")

    def _content(self) -> dict[str, Any]:
        reports = self.attachment.reports if self.attachment else []
        return {
            "process": self._process,
            "rank": int(os.environ.get("RANK", "0")),
            "error": _error_content(self._error),
            "runtimes": [report.as_dict() for report in reports],
            "text": "\n".join(str(report) for report in reports),
        }


def _error_content(error: HiloreError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}
