"""`hilore bench`: a plan beside the other ways to run the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODES = ("store", "gc", "sac-attention", "sac-matmul")
PLANNED = ("exact-plan", "greedy", "compress-int8", "preprint")


def bench(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file written by `hilore plan`.", show_default=False)],
    against: Annotated[
        str,
        typer.Option(
            metavar="MODES",
            help=f"What to compare with, separated by commas: {', '.join(MODES)}; "
            f"with --profile also {', '.join(PLANNED)}.",
        ),
    ] = ",".join(MODES),
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The profile that the plan was made from.", show_default=False),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds; the modes take turns within each.")] = 7,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite that file.")] = False,
) -> None:
    """Measure a plan beside other ways to train.

    Compares step time, peak memory and gradients. A step is a whole actor update. The modes take turns, each in a
    process of its own, so that a machine that drifts is equally unfair to all.
    """
    from hilore_plan.cli import rows, ui
    from hilore_plan.cli.devices import check_device
    from hilore_plan.schema.io import check_writable, load_plan, load_profile, save

    measured = load_plan(plan)
    modes = _modes(against, profile)
    source = None if profile is None else load_profile(profile)
    if json is not None:
        check_writable(json, force=force)
    check_device(measured.environment.device)

    from hilore_plan.bench.pairs import run_bench

    with ui.progress() as progress:
        result = run_bench(measured, against=modes, pairs=pairs, profile=source, progress=progress)
    if json is not None:
        save(result, json)
    ui.show_tables([rows.bench_modes(result)])
    if json is not None:
        ui.note(f"wrote {json}")
        ui.next_command(f"hilore show {json}")
    else:
        ui.next_command(f"hilore apply {plan} -- python train.py")


def _modes(against: str, profile: Path | None) -> list[str]:
    from hilore_plan.errors import UsageError

    modes = list(dict.fromkeys(name.strip() for name in against.split(",") if name.strip()))
    unknown = [name for name in modes if name not in (*MODES, *PLANNED)]
    if unknown or not modes:
        what = f"there is no mode {unknown[0]!r}" if unknown else "no mode was named"
        raise UsageError(what, hint=f"--against takes {', '.join((*MODES, *PLANNED))}, separated by commas")
    planned = [name for name in modes if name in PLANNED]
    if planned and profile is None:
        raise UsageError(
            f"mode {planned[0]!r} is a plan made for the comparison, and needs the profile",
            hint="give the profile that the plan was made from with --profile FILE",
        )
    return modes
