"""What the tables of compression and its risk hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

from hilore_plan.cli.tables import Column, Table
from hilore_plan.planner.explain import explain_binding
from hilore_plan.planner.timeline import view_at
from hilore_plan.quantities import format_bytes, format_seconds
from hilore_plan.schema.plan import Entry, Plan, RiskBudget, codec_of
from hilore_plan.schema.profile import Profile, Risk
from hilore_plan.schema.record import Mode

if TYPE_CHECKING:  # it brings the solver along, which takes time to load
    from hilore_plan.planner.sweep import FrontierPoint

Row = tuple[str, ...]

_BINDING = {
    "memory": "memory keeps the step from being faster, risk does not",
    "risk": "risk keeps the step from being faster",
    "neither": "nothing is recomputed: neither memory nor risk keeps the step from being faster",
}


def plan_buckets(plan: Plan, risk: RiskBudget, title: str) -> Table:
    """Every entry of a plan with compression, by size and exposure, beside what the two plain modes cost."""
    measured = any(entry.measured for entry in plan.entries)
    columns = (
        size_column(plan),
        Column("expo-\nsure", "name"),
        Column("often"),
        Column("peak"),
        *((Column("measured"),) if measured else ()),
        Column("step"),
        Column("x GC"),
        Column("error"),
        Column("com-\npressed"),
    )
    sizes = groupby(plan.entries, key=lambda entry: entry.tokens_up_to)
    return Table(
        title=title,
        columns=columns,
        rows=tuple(row for _, found in sizes for row in _size_rows(list(found), measured=measured)),
        notes=(
            f"budget {plan.budget.asked} = {format_bytes(plan.budget.limit_bytes)} at every size and exposure",
            *update_notes(plan),
            *risk_notes(risk),
            f"solved by {plan.solver.name} to within {plan.solver.gap:.2%} of the best step time",
            explain_binding(plan.entries[-1]),
        ),
    )


def size_column(plan: Plan) -> Column:
    """The heading above `size_cells`."""
    return Column("tokens,\ngradients" if plan.distinguishes_gradients else "tokens\nup to")


def size_cells(entries: Sequence[Entry]) -> list[str]:
    """What the entries of one size are for: its tokens, and gradients where they differ; each where it changes."""
    kinds = [entry.gradients for entry in entries]
    tokens = str(entries[0].tokens_up_to)
    if len(set(kinds)) == 1:
        return [tokens, *[""] * (len(entries) - 1)]
    changes = ["" if kind == before else kind for kind, before in zip(kinds, [None, *kinds], strict=False)]
    return [f"{tokens} {changes[0]}", *changes[1:]]


def update_notes(plan: Plan) -> tuple[str, ...]:
    """What entries for micro-batches without gradients are, and what an update of both kinds comes to."""
    if not plan.distinguishes_gradients:
        return ()
    largest = [entry for entry in plan.entries if entry.tokens_up_to == plan.entries[-1].tokens_up_to]
    step = sum(plan.share(entry) * entry.predicted.step_seconds for entry in largest)
    count = plan.workload.micro_batches
    return (
        "gradients none: micro-batches that begin before any gradient is there, as the first of an update does",
        f"an update of {count} micro-batches of the largest size: {format_seconds(step)}"
        + (f", {largest[-1].gc.step_seconds / step:.2f} x GC" if step else ""),
    )


def risk_notes(risk: RiskBudget) -> tuple[str, ...]:
    """The account of a plan's risk, in lines below its table."""
    asked = risk.asked if risk.asked.replace(".", "").isdigit() else f"{risk.asked} = {risk.limit:.4f}"
    return (
        f"risk {asked}: the relative gradient error of a step is expected to be {risk.expected:.4f}",
        f"price of risk: {_price(risk.price)}; {_BINDING[risk.binding]}",
        f"exposure: {risk.norm.upper()} norm, relative to the mean; error: of a step that is all in one bucket",
    )


def profile_codecs(profile: Profile, number: int) -> Table:
    """What each codec does with each unit of one class, at the largest measured size."""
    view = view_at(profile, profile.points[-1].tokens)
    cls = view.classes[number]
    places = [place for place, index in enumerate(view.class_of) if index == number]
    rows = []
    for unit in cls.units:
        for form in cls.forms[unit]:
            codec = codec_of(form.action)
            if codec is not None:
                risks = [view.rho[place].get((unit, form.action)) for place in places]
                known = [risk for risk in risks if risk is not None]
                rows.append(
                    (
                        cls.names[unit],
                        codec,
                        format_bytes(form.bytes),
                        f"{form.bytes / cls.value_bytes[unit]:.0%}" if cls.value_bytes[unit] else "-",
                        format_seconds(form.seconds),
                        _root(fmean(known)) if known else "-",
                        _root(sum(known)) if known else "-",
                    )
                )
    return Table(
        title=f"{cls.name}: codecs, per block at {view.tokens} tokens",
        columns=(
            Column("unit", "name"),
            Column("codec", "name"),
            Column("bytes"),
            Column("of its own"),
            Column("time"),
            Column("error in\none block"),
            Column("in all"),
        ),
        rows=tuple(rows),
        notes=(
            "time: to encode and decode; error: relative gradient error of a step with the unit compressed throughout",
            *(_calibration(profile.risk) if profile.risk is not None else ("not calibrated: plans stay exact",)),
        ),
    )


def frontier(points: Iterable[FrontierPoint], title: str) -> Table:
    """What each pair of budget and risk comes to."""
    return Table(
        title=title,
        columns=(
            Column("budget"),
            Column("risk"),
            Column("step"),
            Column("x GC"),
            Column("peak"),
            Column("error"),
            Column("price"),
            Column("binding", "name"),
        ),
        rows=tuple(_frontier_row(point) for point in points),
        notes=(
            "step and error: with the calibrated mix of exposures, at the largest size; peak: of the highest bucket",
            "price: seconds per squared relative error; binding: what keeps the step from being faster",
        ),
    )


def bucket(entry: Entry) -> str:
    """An entry's interval of exposures in a few characters."""
    if entry.exposure_up_to is None:
        return "above" if entry.frequency < 1 else "any"
    return "0" if entry.exposure_up_to == 0 else f"<= {entry.exposure_up_to:.2f}"


def _size_rows(entries: list[Entry], *, measured: bool) -> Iterable[Row]:
    """The entries of one size, and below them the two plain modes."""
    for size, entry in zip(size_cells(entries), entries, strict=True):
        predicted = entry.predicted
        mode = Mode(step_seconds=predicted.step_seconds, peak_bytes=predicted.peak_bytes)
        found = format_bytes(entry.measured.peak_bytes) if entry.measured else ""
        yield (
            size,
            bucket(entry),
            f"{entry.frequency:.0%}",
            *_mode_cells(mode, found, entry.gc, measured=measured),
            _error(predicted.error),
            f"{predicted.compressed_share:.0%}",
        )
    for name, mode in (("GC", entries[0].gc), ("store", entries[0].store)):
        yield ("", name, "", *_mode_cells(mode, "", entries[0].gc, measured=measured), "", "")


def _mode_cells(mode: Mode, found: str, gc: Mode, *, measured: bool) -> Row:
    speed = f"{gc.step_seconds / mode.step_seconds:.2f}" if mode.step_seconds else "-"
    peaks = (format_bytes(mode.peak_bytes), *((found,) if measured else ()))
    return (*peaks, format_seconds(mode.step_seconds), speed)


def _frontier_row(point: FrontierPoint) -> Row:
    if point.step_seconds is None:
        return (point.budget, point.risk, "-", "-", "-", "-", "-", point.binding)
    return (
        point.budget,
        point.risk,
        format_seconds(point.step_seconds),
        "-" if point.speed_vs_gc is None else f"{point.speed_vs_gc:.3f}",
        format_bytes(point.peak_bytes or 0),
        _error(point.expected_error or 0.0),
        f"{point.price:.3g}",
        point.binding,
    )


def _calibration(risk: Risk) -> tuple[str, ...]:
    noise = "" if risk.noise is None else f"; noise floor {risk.noise:.4f}"
    ratios = [mix.predicted / mix.measured for mix in risk.held_out if mix.measured]
    held_out = (
        f"predicted over measured on what was kept aside: {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    )
    return (
        f"calibrated in fp32 on {risk.micro_batches} micro-batches of {risk.source}{noise}",
        *((held_out,) if held_out else ()),
    )


def _error(error: float) -> str:
    return f"{error:.4f}" if error else "0"


def _root(square: float) -> str:
    return f"{square**0.5:.1e}"


def _price(price: float) -> str:
    return f"{price:.3g} s per squared error" if price else "nothing"
