"""The sweep of `hilore plan`: what pairs of a budget and a risk come to, as a table, CSV or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from hilore_plan.errors import UsageError

if TYPE_CHECKING:
    from hilore_plan.planner.sweep import FrontierPoint
    from hilore_plan.schema.profile import Profile

BUDGETS = "1.0,1.05,1.1,1.2,1.3"
RISKS = "0,0.005,0.015,0.05"
STDOUT = Path("-")


def budgets_of(listed: str | None, single: str | None) -> tuple[str, ...]:
    """The budgets of a sweep, where a bare number means times GC; else the one of `--budget`, else some.

    Raises:
        UsageError: if the list is empty, or a budget makes no sense.
    """
    from hilore_plan.quantities import Budget

    budgets = [f"{part}x-gc" if _is_number(part) else part for part in _parts(listed or single or BUDGETS, "budget")]
    return tuple(Budget.parse(budget).asked for budget in budgets)


def risks_of(listed: str | None, single: str | None) -> tuple[str, ...]:
    """The risks of a sweep; else the one of `--risk`, else some.

    Raises:
        UsageError: if the list is empty, or a risk makes no sense.
    """
    from hilore_plan.planner.asked import check_risk

    risks = _parts(listed or single or RISKS, "risk")
    for risk in risks:
        check_risk(risk)
    return risks


def show_frontier(
    path: Path,
    *,
    budgets: Sequence[str],
    risks: Sequence[str],
    exposure_buckets: int,
    solver: str,
    csv: Path | None,
    force: bool,
    json: bool,
) -> None:
    """Solve every pair and print what comes out; `csv` gets it as a file, or instead of the table if it is `-`."""
    from hilore_plan.cli import risk_rows, ui
    from hilore_plan.cli.devices import device_memory_bytes
    from hilore_plan.cli.rows import describe
    from hilore_plan.planner.sweep import sweep
    from hilore_plan.schema.io import check_writable, load_profile

    if csv is not None and csv != STDOUT:
        check_writable(csv, force=force)
    profile = load_profile(path)
    shares = any(budget.endswith("%") for budget in budgets)
    with ui.progress() as progress:
        points = sweep(
            profile,
            budgets=budgets,
            risks=risks,
            exposure_buckets=exposure_buckets,
            solver=solver,
            progress=progress,
            device_bytes=device_memory_bytes(profile.environment.device) if shares else None,
        )
    if csv is not None and csv != STDOUT:
        csv.write_text(csv_text(points), encoding="utf-8")
        ui.note(f"wrote {csv}")
    if json:
        sys.stdout.write(_json_text(profile, points))
    elif csv == STDOUT:
        sys.stdout.write(csv_text(points))
    else:
        ui.show_tables([risk_rows.frontier(points, describe(profile.workload))])
    ui.next_command(f"hilore plan {path} --budget {budgets[-1]} --risk {risks[-1]} -o plans/{path.name}")


def csv_text(points: Sequence[FrontierPoint]) -> str:
    """The points as CSV with a header; what an infeasible budget does not have is empty."""
    from csv import DictWriter

    from hilore_plan.planner.sweep import FrontierPoint

    text = StringIO()
    writer = DictWriter(text, [field.name for field in fields(FrontierPoint)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in points)
    return text.getvalue()


def _json_text(profile: Profile, points: Sequence[FrontierPoint]) -> str:
    from hilore_plan.schema.text import dumps

    return dumps(
        {
            "tokens": profile.points[-1].tokens,
            "gc": profile.points[-1].gc.model_dump(),
            "points": list(map(asdict, points)),
        }
    )


def _parts(text: str, what: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise UsageError(f"there is no {what} to sweep over", hint="give several, with commas: 0.005,0.015")
    return parts


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
