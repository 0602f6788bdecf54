"""What a plan predicts for one actor update, whose micro-batches may have several entries."""

from __future__ import annotations

from collections.abc import Sequence

from hilore_plan.runtime.lookup import Lookup
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.record import Mode


def predicted_step(plan: Plan, exposures: Sequence[float]) -> Mode:
    """The seconds and the peak of an update of the plan's workload.

    Args:
        plan: its entries hold the figures of an update that is all under one of them.
        exposures: of the update's micro-batches, relative to their mean.
    """
    lookup = Lookup(plan)
    begins = ("none", *(plan.workload.last_begins for _ in exposures[1:]))
    places = zip(exposures, begins, strict=True)
    found = [lookup.find(plan.workload.tokens, exposure, gradients) for exposure, gradients in places]
    entries = [plan.entries[index] for index in found if index is not None]
    return Mode(
        step_seconds=sum(entry.predicted.step_seconds for entry in entries) / len(entries),
        peak_bytes=max(entry.predicted.peak_bytes for entry in entries),
    )
