"""What verl loads through its entry point group `verl.plugins`, and `hilore apply` in every process it starts.

verl only imports a plug-in, in each process that imports verl, and Ray's workers are such processes: so importing this
waits for the engine, where the environment names a plan. On a cluster, give `HILORE_PLAN` in Ray's `runtime_env`.
"""

from __future__ import annotations

import os
import sys

from hilore_plan.integrations.after_import import after_import
from hilore_plan.integrations.child_report import CHECK_EVERY, PLAN, REGROUP, child_report, stop_on_error

MODULE = "verl.workers.engine.fsdp.transformer_impl"
ENGINE = "FSDPEngineWithLMHead"


def wait() -> None:
    """Have the plan put into the engine as soon as it is imported."""
    if PLAN in os.environ:
        after_import(MODULE, install)


def install() -> None:
    """Put the plan of the environment into verl's engine; under `hilore apply`, report on it.

    Raises:
        HiloreError: the plan cannot be read, or something is asked for that only TRL's trainers do. Under
            `hilore apply` the launcher says so instead, and this process ends.
    """
    from hilore_plan.errors import HiloreError
    from hilore_plan.integrations.verl import METHOD, attach_to

    report = child_report()
    engine = getattr(sys.modules[MODULE], ENGINE)
    try:
        _refuse_the_rest()
        attachment = attach_to(engine, os.environ[PLAN])
    except HiloreError as error:
        if report is None:
            raise
        report.stop(error)
    if report is not None:
        report.follow(attachment, ENGINE)
        stop_on_error(engine, METHOD, report)


def _refuse_the_rest() -> None:
    """Refuses what the launcher was asked for and an engine cannot do: its parameters are sharded, its rows its own."""
    from hilore_plan.errors import RefusedError

    words = os.environ.get(REGROUP, "").split(",")
    asked = {
        "--check-every": os.environ.get(CHECK_EVERY, "0") != "0",
        "--regroup": "rows" in words,
        "--leave-out-silent": "silent" in words,
    }
    for option in (option for option, wanted in asked.items() if wanted):
        raise RefusedError(f"{option} is for TRL's trainers; verl's {ENGINE} does not know it", f"leave out {option}")


wait()
