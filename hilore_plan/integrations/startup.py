"""What runs at the start of every Python process under `hilore apply`.

Waits for the import of a trainer that hilore knows and puts the plan into it. Every tool that the training command
starts runs this too, so it imports little but the standard library until then. The settings travel in the environment,
which torchrun and accelerate pass on to their workers.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

from hilore_plan.integrations.after_import import after_import
from hilore_plan.integrations.child_report import ChildReport, child_report, stop_on_error
from hilore_plan.integrations.trl_trainers import TRAINERS, loss_method


def begin(private: str) -> None:
    """Called by the private `sitecustomize`, whose directory is `private`."""
    sys.path[:] = [place for place in sys.path if place != private]
    installer = _Installer()
    for module in TRAINERS:
        after_import(module, partial(installer.install, module))
    import hilore_plan.integrations.verl_plugin  # noqa: F401 - importing it is what puts it in, as verl itself does

    run_other_sitecustomize()


def run_other_sitecustomize() -> None:
    """Runs the `sitecustomize` that ours stands in front of, as Python would have, under its own name."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _Installer:
    """Puts one plan into each trainer class that is imported; from the first on this process reports."""

    def __init__(self) -> None:
        self._report: ChildReport | None = None

    def install(self, module: str) -> None:
        """Called when the module of a known trainer has been imported."""
        if self._report is None:
            self._report = child_report()
        if self._report is not None:
            self._put_into(getattr(sys.modules[module], TRAINERS[module]), self._report)

    def _put_into(self, trainer_class: Any, report: ChildReport) -> None:
        report.trainers.append(trainer_class.__name__)
        report.write()
        from hilore_plan.errors import HiloreError

        try:
            report.attach(trainer_class)
        except HiloreError as error:
            report.stop(error)
        for method in (loss_method(trainer_class), *report.other_methods):
            stop_on_error(trainer_class, method, report)
