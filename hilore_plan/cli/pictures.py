"""Documents drawn into picture files, for `hilore show --plot`. What is in the pictures: `maps` and `charts`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilore_plan.cli.charts import (
    bytes_by_action,
    frontier,
    peak_timeline,
    predicted_and_measured,
    predicted_and_measured_error,
    unit_costs,
)
from hilore_plan.cli.maps import action_map, risk_map
from hilore_plan.errors import FileError, UsageError
from hilore_plan.schema.bench import Bench
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import Profile, Risk
from hilore_plan.tidy.fit import check_fit

if TYPE_CHECKING:
    from hilore_plan.schema.io import Document

DOTS_PER_INCH = 150


def draw(document: Document, path: Path, *, entry: Entry | None = None, profile: Profile | None = None) -> None:
    """Draw a document into a picture file, whose ending chooses the format.

    Args:
        document: a profile, plan or bench.
        path: where the picture goes.
        entry: of a plan, the entry to draw; the last one by default.
        profile: the plan's profile; with it, a plan's picture shows bytes and the peak timeline as well.

    Raises:
        UsageError: if matplotlib is not installed, or if the profile is not the plan's.
        FileError: if the picture cannot be written.
    """
    figure_class = _matplotlib()
    if isinstance(document, Plan):
        figure = _plan_figure(figure_class, document, entry or document.entries[-1], profile)
    elif isinstance(document, Bench):
        figure = _bench_figure(figure_class, document)
    else:
        figure = _profile_figure(figure_class, document)
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot draw {path}: {error}", hint="choose a name that ends in .png, .svg or .pdf") from error


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("pictures need matplotlib", hint="pip install 'hilore-plan[notebooks]'") from error
    return Figure


def _plan_figure(figure_class: Any, plan: Plan, entry: Entry, profile: Profile | None) -> Any:
    if profile is None:
        figure = figure_class(figsize=(14, 6), layout="constrained")
        left, right = figure.subplots(1, 2)
        action_map(left, plan, entry)
        predicted_and_measured(right, plan)
        return figure
    check_fit(plan, profile)
    figure = figure_class(figsize=(14, 11), layout="constrained")
    (actions, counts), (memory, peaks) = figure.subplots(2, 2, width_ratios=(3, 2))
    action_map(actions, plan, entry)
    bytes_by_action(counts, plan, profile, entry.tokens_up_to)
    peak_timeline(memory, plan, profile, entry)
    predicted_and_measured(peaks, plan)
    return figure


def _bench_figure(figure_class: Any, bench: Bench) -> Any:
    figure = figure_class(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    frontier(left, bench)
    predicted_and_measured(right, bench)
    return figure


def _profile_figure(figure_class: Any, profile: Profile) -> Any:
    if profile.risk is None:
        figure = figure_class(figsize=(9, 6), layout="constrained")
        unit_costs(figure.subplots(), profile)
        return figure
    figure = figure_class(figsize=(max(12, 6 * len(profile.codecs)), 11), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    _draw_risk(upper, profile, profile.risk)
    costs, errors = lower.subplots(1, 2, width_ratios=(3, 2))
    unit_costs(costs, profile)
    predicted_and_measured_error(errors, profile.risk.held_out)
    return figure


def _draw_risk(figure: Any, profile: Profile, risk: Risk) -> None:
    codecs = [codec for codec in profile.codecs if any(unit.codec == codec for units in risk.units for unit in units)]
    for axes, codec in zip(figure.subplots(1, max(1, len(codecs)), squeeze=False)[0], codecs, strict=False):
        risk_map(axes, profile, risk, codec)
