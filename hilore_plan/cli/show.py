"""`hilore show`: what is in a profile, plan or bench file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hilore_plan.cli.tables import Table
    from hilore_plan.schema.io import Document
    from hilore_plan.schema.plan import Entry
    from hilore_plan.schema.profile import Profile


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, plan or bench file.", show_default=False)],
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Show the plan's entry for this many tokens.  [default: the largest]", show_default=False
        ),
    ] = None,
    exposure: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Show the plan's entry for this exposure, relative to the mean.  [default: the highest]",
            show_default=False,
        ),
    ] = None,
    first: Annotated[
        bool, typer.Option("--first", help="Show the plan's entry for the first micro-batch of an update.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="The plan's profile: adds bytes and seconds of each unit.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Also draw that entry, or a profile or bench (needs matplotlib).",
            show_default=False,
        ),
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
    entry = _entry(document, tokens, exposure, first=first)
    if plot is not None:
        from hilore_plan.cli.pictures import draw

        check_writable(plot, force=True)
        draw(document, plot, entry=entry, profile=measured)
    ui.show_document(document, _tables(document, entry, measured), as_json=json)
    if plot is not None:
        ui.note(f"drew {plot}")
    _show_next(document, file)


def _tables(document: Document, entry: Entry | None, profile: Profile | None) -> list[Table]:
    from hilore_plan.cli import risk_rows, rows
    from hilore_plan.schema.bench import Bench
    from hilore_plan.schema.plan import Plan

    if isinstance(document, Bench):
        return [rows.bench_modes(document)]
    if isinstance(document, Plan):
        return [rows.plan_entries(document), *rows.plan_units(document, entry or document.entries[-1], profile)]
    units = [rows.profile_units(document, number) for number in range(len(document.classes))]
    codecs = [risk_rows.profile_codecs(document, number) for number in range(len(units)) if document.codecs]
    return [rows.profile_steps(document), *units, *codecs, rows.profile_outside(document)]


def _entry(document: Document, tokens: int | None, exposure: float | None, *, first: bool) -> Entry | None:
    """The plan's entry for a micro-batch; None for documents that have no entries."""
    from hilore_plan.errors import UsageError
    from hilore_plan.schema.plan import Plan

    if not isinstance(document, Plan):
        return None
    largest = document.entries[-1].tokens_up_to
    sizes = [entry.tokens_up_to for entry in document.entries if (tokens or largest) <= entry.tokens_up_to]
    if not sizes:
        raise UsageError(f"the plan has no entry for {tokens} tokens", hint=f"its largest is for {largest}")
    begins = "none" if first and document.distinguishes_gradients else "live"
    found = [entry for entry in document.entries if entry.tokens_up_to == sizes[0]]
    entries = [entry for entry in found if entry.gradients == begins] or found
    if exposure is None:
        return entries[-1]
    fitting = (e for e in entries if e.exposure_up_to is None or exposure <= e.exposure_up_to)
    return next(fitting, entries[-1])


def _show_next(document: Document, file: Path) -> None:
    from hilore_plan.cli import ui
    from hilore_plan.schema.plan import Plan
    from hilore_plan.schema.profile import Profile

    if isinstance(document, Profile):
        ui.next_command(f"hilore plan {file} --budget 1.1x-gc -o plans/{file.name}")
    elif isinstance(document, Plan):
        ui.next_command(f"hilore apply {file} -- python train.py")
