"""`hilore plan`: the best mix under a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from hilore_plan.schema.plan import Plan
    from hilore_plan.schema.profile import Profile


def plan(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="A file written by `hilore profile`.", show_default=False)
    ],
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            help="The highest peak memory: 1.1x-gc, 0.8x-store, 40GiB, 512MB or 80%.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the plan.", show_default=False)],
    token_buckets: Annotated[
        int, typer.Option(min=1, max=64, help="Sizes of micro-batch with an entry of their own.")
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:
    """Choose the best mix under a memory budget.

    The result is a plan: whether to store, cast or recompute each saved value of each block, by size of
    micro-batch. The budget is the peak of all device memory: parameters, gradients, optimizer and activations.
    1.1x-gc allows 10 % more than gradient checkpointing takes.
    """
    from hilore_plan.quantities import Budget
    from hilore_plan.schema.io import check_writable, load_profile, save

    parsed = Budget.parse(budget)
    measured = load_profile(profile)
    check_writable(output, force=force)
    device = measured.environment.device
    if verify is None:
        verify = _can_verify(device)
    if verify:
        _prepare_measuring(device)
    result = _solved(measured, parsed.asked, parsed.kind == "device", token_buckets, solver, verify=verify)
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


def _solved(
    profile: Profile, budget: str, share_of_device: bool, token_buckets: int, solver: str, *, verify: bool
) -> Plan:
    from hilore_plan.cli import ui
    from hilore_plan.cli.devices import device_memory_bytes
    from hilore_plan.planner.plan import solve_plan

    device_bytes = device_memory_bytes(profile.environment.device) if share_of_device else None
    with ui.progress() as progress:
        result = solve_plan(
            profile,
            budget=budget,
            token_buckets=token_buckets,
            solver=solver,
            progress=progress,
            device_bytes=device_bytes,
        )
        if verify:
            from hilore_plan.bench.verify import verify_plan

            result = verify_plan(result, profile, progress=progress)
    return result


def _show(plan: Plan, output: Path, *, json: bool) -> None:
    from hilore_plan.cli import rows, ui

    ui.show_document(plan, [rows.plan_entries(plan)], as_json=json)
    ui.note(f"wrote {output}")
    ui.next_command(f"hilore apply {output} -- python train.py")
