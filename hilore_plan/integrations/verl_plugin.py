"""What verl loads through its entry point group `verl.plugins`, and `hilore apply` in every process it starts.

verl only imports a plug-in, in each process that imports verl, and Ray's workers are such processes: so importing this
waits for the engine, where the environment names a plan. On a cluster, give `HILORE_PLAN` in Ray's `runtime_env`.
"""

from __future__ import annotations

import os
import sys

from hilore_plan.integrations.after_import import after_import
from hilore_plan.integrations.child_report import PLAN, report_on

MODULE = "verl.workers.engine.fsdp.transformer_impl"
ENGINE = "FSDPEngineWithLMHead"


def wait() -> None:
    """Have the plan put into the engine as soon as it is imported."""
    if PLAN in os.environ:
        after_import(MODULE, install)


def install() -> None:
    """Put the plan of the environment into verl's engine; under `hilore apply`, report on it."""
    from hilore_plan.integrations.verl import attach_to

    report_on(attach_to(getattr(sys.modules[MODULE], ENGINE), os.environ[PLAN]), ENGINE)


wait()
