"""`hilore show`: what is in a profile, plan or bench file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hilore_plan.cli.tables import Table
    from hilore_plan.schema.io import Document
    from hilore_plan.schema.plan import Entry, Plan
    from hilore_plan.schema.profile import Profile


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, plan or bench file.", show_default=False)],
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Show the plan's entry for this many tokens.  [default: the largest]", show_default=False
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="The plan's profile: adds bytes and seconds of each unit.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw it (needs matplotlib).", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the file's content as JSON instead of tables.")] = False,
) -> None:
    """Print what a profile, plan or bench file says.

    Of a plan: every entry, and per block and unit the action. Of a profile: bytes and seconds of every unit.
    """
    from hilore_plan.cli import ui
    from hilore_plan.schema.io import check_writable, load_document, load_profile

    document = load_document(file)
    measured = load_profile(profile) if profile is not None else None
    if plot is not None:
        from hilore_plan.cli.pictures import draw

        check_writable(plot, force=True)
        draw(document, plot, profile=measured)
    ui.show_document(document, _tables(document, tokens, measured), as_json=json)
    if plot is not None:
        ui.note(f"drew {plot}")
    _show_next(document, file)


def _tables(document: Document, tokens: int | None, profile: Profile | None) -> list[Table]:
    from hilore_plan.cli import rows
    from hilore_plan.schema.bench import Bench
    from hilore_plan.schema.plan import Plan

    if isinstance(document, Bench):
        return [rows.bench_modes(document)]
    if isinstance(document, Plan):
        return [rows.plan_entries(document), *rows.plan_units(document, _entry(document, tokens), profile)]
    units = [rows.profile_units(document, number) for number in range(len(document.classes))]
    return [rows.profile_steps(document), *units, rows.profile_outside(document)]


def _entry(plan: Plan, tokens: int | None) -> Entry:
    from hilore_plan.errors import UsageError

    if tokens is None:
        return plan.entries[-1]
    for entry in plan.entries:
        if tokens <= entry.tokens_up_to:
            return entry
    raise UsageError(
        f"the plan has no entry for {tokens} tokens", hint=f"its largest is for {plan.entries[-1].tokens_up_to}"
    )


def _show_next(document: Document, file: Path) -> None:
    from hilore_plan.cli import ui
    from hilore_plan.schema.plan import Plan
    from hilore_plan.schema.profile import Profile

    if isinstance(document, Profile):
        ui.next_command(f"hilore plan {file} --budget 1.1x-gc -o plans/{file.name}")
    elif isinstance(document, Plan):
        ui.next_command(f"hilore apply {file} -- python train.py")
