"""`hilore apply`: run an unchanged training command under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hilore_plan.integrations.launcher import RegroupWord


def apply(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file written by `hilore plan`.", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="The training command, after two dashes.", show_default=False),
    ] = None,
    check_every: Annotated[
        int,
        typer.Option(min=0, help="Measure and log the true gradient error of every so many steps; 0: of none."),
    ] = 0,
    regroup: Annotated[
        bool,
        typer.Option(
            "--regroup", help="GRPOTrainer: put each step's rows into micro-batches of like length and exposure."
        ),
    ] = False,
    leave_out_silent: Annotated[
        bool,
        typer.Option(
            "--leave-out-silent",
            help="GRPOTrainer: leave out rows that are exactly without signal; one process, no KL.",
        ),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write the report of the run to this file, as JSON.", show_default=False)
    ] = None,
) -> None:
    """Run a training command under a plan.

    The plan attaches itself to the command's TRL GRPOTrainer. The command needs no change. Its exit code and
    signals pass through, and a report follows its output.

    Example: hilore apply plans/x.json -- python train.py --steps 100
    """
    from hilore_plan.errors import UsageError
    from hilore_plan.schema.io import check_writable, load_plan

    load_plan(plan)
    if not command:
        raise UsageError("no command was given", hint=f"hilore apply {plan} -- python train.py")
    if report is not None:
        check_writable(report, force=True)

    from hilore_plan.integrations.launcher import launch

    asked: dict[RegroupWord, bool] = {"rows": regroup, "silent": leave_out_silent}
    words = [word for word, wanted in asked.items() if wanted]
    raise typer.Exit(launch(plan, command, report_path=report, check_every=check_every, regroup=words))
