"""Rows about micro-batches: the entries of a plan, or the points at which a profile was measured."""

from __future__ import annotations

import math
from typing import NamedTuple

from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import Profile


class EntryRow(NamedTuple):
    """One entry or measured point; `Tables.entries` says what the fields are."""

    entry: int
    tokens_up_to: int
    store_step_seconds: float
    store_peak_bytes: int
    gc_step_seconds: float
    gc_peak_bytes: int
    gradients: str | None = None
    exposure_up_to: float | None = None
    frequency: float | None = None
    weight: float | None = None
    limit_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_step_seconds: float | None = None
    measured_step_seconds: float | None = None
    recompute_seconds: float | None = None
    speed_vs_gc: float | None = None
    error: float | None = None
    compressed_share: float | None = None
    binding: str | None = None


def plan_entries(plan: Plan) -> list[EntryRow]:
    """What each entry of a plan is for, and what it costs."""
    return [_entry_row(number, entry, plan.budget.limit_bytes) for number, entry in enumerate(plan.entries)]


def profile_entries(profile: Profile) -> list[EntryRow]:
    """The two plain modes at each measured point; nothing was planned yet."""
    return [
        EntryRow(
            entry=number,
            tokens_up_to=point.tokens,
            store_step_seconds=point.store.step_seconds,
            store_peak_bytes=point.store.peak_bytes,
            gc_step_seconds=point.gc.step_seconds,
            gc_peak_bytes=point.gc.peak_bytes,
        )
        for number, point in enumerate(profile.points)
    ]


def _entry_row(number: int, entry: Entry, limit_bytes: int) -> EntryRow:
    predicted, measured = entry.predicted, entry.measured
    return EntryRow(
        entry=number,
        tokens_up_to=entry.tokens_up_to,
        store_step_seconds=entry.store.step_seconds,
        store_peak_bytes=entry.store.peak_bytes,
        gc_step_seconds=entry.gc.step_seconds,
        gc_peak_bytes=entry.gc.peak_bytes,
        gradients=entry.gradients,
        exposure_up_to=math.inf if entry.exposure_up_to is None else entry.exposure_up_to,
        frequency=entry.frequency,
        weight=entry.weight,
        limit_bytes=limit_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        measured_peak_bytes=None if measured is None else measured.peak_bytes,
        predicted_step_seconds=predicted.step_seconds,
        measured_step_seconds=None if measured is None else measured.step_seconds,
        recompute_seconds=predicted.recompute_seconds,
        speed_vs_gc=entry.gc.step_seconds / predicted.step_seconds if predicted.step_seconds else None,
        error=predicted.error,
        compressed_share=predicted.compressed_share,
        binding=predicted.binding,
    )
