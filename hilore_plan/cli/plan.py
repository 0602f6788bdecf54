"""`hilore plan`: the best mix under a memory budget and a risk of gradient error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from hilore_plan.schema.plan import Plan
    from hilore_plan.schema.profile import Profile


def plan(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="A file written by `hilore profile`.", show_default=False)
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            help="The highest peak memory: 1.1x-gc, 0.8x-store, 40GiB, 512MB or 80%.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the plan.", show_default=False)
    ] = None,
    risk: Annotated[
        str | None,
        typer.Option(
            help="The relative gradient error that a step may have: 0.015, or 0.3x-noise; 0 compresses nothing.  "
            "[default: 0.015 with a calibrated profile, else 0]",
            show_default=False,
        ),
    ] = None,
    token_buckets: Annotated[
        int, typer.Option(min=1, max=64, help="Sizes of micro-batch with an entry of their own.")
    ] = 4,
    exposure_buckets: Annotated[
        int, typer.Option(min=1, max=64, help="Intervals of exposure with an entry of their own, at each size.")
    ] = 4,
    solver: Annotated[Literal["highs", "cbc"], typer.Option(help="Which solver chooses.")] = "highs",
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Run the plan here and tighten it until its measured peak is inside the budget.  "
            "[default: verify where the profile's device is on this machine]",
            show_default=False,
        ),
    ] = None,
    sweep_budget: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Write no plan but print what these budgets come to: 1.05,1.1,1.3 (times GC).",
            show_default=False,
        ),
    ] = None,
    sweep_risk: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="The same for these risks: 0,0.005,0.015,0.05.", show_default=False),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what was swept to a CSV file, or - for stdout.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Choose the best mix under a memory budget and a risk of gradient error.

    The result is a plan: whether to store, cast, compress or recompute each saved value of each block, by size of
    micro-batch and by exposure: how much a micro-batch can move the policy. The budget is the peak of all device
    memory: parameters, gradients, optimizer and activations. 1.1x-gc allows 10 % more than gradient checkpointing
    takes. Only a profile made with --codecs can compress.
    """
    from hilore_plan.cli import frontier

    if sweep_budget is not None or sweep_risk is not None:
        frontier.show_frontier(
            profile,
            budgets=frontier.budgets_of(sweep_budget, budget),
            risks=frontier.risks_of(sweep_risk, risk),
            exposure_buckets=exposure_buckets,
            solver=solver,
            csv=csv,
            force=force,
            json=json,
        )
        return
    _plan(profile, budget, output, risk, token_buckets, exposure_buckets, solver, verify, csv, force=force, json=json)


def _plan(
    profile: Path,
    budget: str | None,
    output: Path | None,
    risk: str | None,
    token_buckets: int,
    exposure_buckets: int,
    solver: str,
    verify: bool | None,
    csv: Path | None,
    *,
    force: bool,
    json: bool,
) -> None:
    from hilore_plan.errors import UsageError
    from hilore_plan.planner.asked import check_risk
    from hilore_plan.quantities import Budget
    from hilore_plan.schema.io import check_writable, load_profile, save

    if budget is None or output is None:
        missing = "'--budget' / '-b'" if budget is None else "'--output' / '-o'"
        raise UsageError(f"missing option {missing}", hint="hilore plan --help")
    if csv is not None:
        raise UsageError("--csv is for what is swept", hint="add --sweep-budget or --sweep-risk, or use --json")
    parsed = Budget.parse(budget)
    if risk is not None:
        check_risk(risk)
    measured = load_profile(profile)
    check_writable(output, force=force)
    device = measured.environment.device
    if verify is None:
        verify = _can_verify(device)
    if verify:
        _prepare_measuring(device)
    options = {"risk": risk, "token_buckets": token_buckets, "exposure_buckets": exposure_buckets, "solver": solver}
    result = _solved(measured, parsed.asked, parsed.kind == "device", options, verify=verify)
    save(result, output)
    _show(result, output, json=json)


def _can_verify(device: str) -> bool:
    from hilore_plan.cli import ui
    from hilore_plan.cli.devices import device_there

    there = device_there(device)
    if not there:
        ui.note(f"not verified: the profile's device {device!r} is not on this machine")
    return there


def _prepare_measuring(device: str) -> None:
    from hilore_plan.cli.devices import check_device
    from hilore_plan.errors import DeviceError
    from hilore_plan.profiler import malloc

    try:
        check_device(device)
    except DeviceError as error:
        raise DeviceError(error.message, hint="--no-verify plans without measuring") from error
    if device == "cpu":
        malloc.reexec_with_malloc_settings()


def _solved(profile: Profile, budget: str, share_of_device: bool, options: dict[str, Any], *, verify: bool) -> Plan:
    from hilore_plan.cli import ui
    from hilore_plan.cli.devices import device_memory_bytes
    from hilore_plan.planner.plan import solve_plan

    device_bytes = device_memory_bytes(profile.environment.device) if share_of_device else None
    with ui.progress() as progress:
        result = solve_plan(profile, budget=budget, progress=progress, device_bytes=device_bytes, **options)
        if verify:
            from hilore_plan.bench.verify import verify_plan

            result = verify_plan(result, profile, progress=progress)
    return result


def _show(plan: Plan, output: Path, *, json: bool) -> None:
    from hilore_plan.cli import rows, ui

    ui.show_document(plan, [rows.plan_entries(plan)], as_json=json)
    ui.note(f"wrote {output}")
    ui.next_command(f"hilore apply {output} -- python train.py")
