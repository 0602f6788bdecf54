"""The first micro-batch of an update: no gradient is there yet, and what the gradients will take is free at its peak.

`zero_grad(set_to_none=True)`, the default of torch and of trainers, frees all gradients after an update. Those of the
first micro-batch then arise while backward lets go of what was kept, so that it may keep more than those after it.
"""

from __future__ import annotations

from typing import Final

from hilore_plan.errors import UsageError
from hilore_plan.schema.profile import Point, Profile
from hilore_plan.schema.record import GradientState

# of the limit: gradients that take less, as those of adapters, leave too little room for entries of their own
WORTH_A_PLAN: Final = 0.01


def distinguished(profile: Profile, limit: int) -> tuple[GradientState, ...]:
    """What micro-batches may begin with that a plan has entries for: `none` first, where it was measured and pays."""
    measured = all(point.without_gradients for point in profile.points)
    pays = profile.points[-1].outside.gradient_bytes >= WORTH_A_PLAN * limit
    return ("none", "live") if measured and pays else ("live",)


def without_gradients(profile: Profile) -> Profile:
    """The profile as a micro-batch finds it that begins without gradients.

    Raises:
        UsageError: if that was not measured.
    """
    workload = profile.workload.model_copy(update={"accumulation": False})
    points = tuple(_without(point) for point in profile.points)
    return profile.model_copy(update={"workload": workload, "points": points})


def _without(point: Point) -> Point:
    found = point.without_gradients
    if found is None:
        raise UsageError(
            "the profile does not tell micro-batches that begin without gradients from others",
            hint="profile again: it was made with --no-accumulation, or by an earlier hilore",
        )
    outside = {name: getattr(found, name) for name in type(found).model_fields if name != "classes"}
    classes = (
        measure.model_copy(update={name: getattr(own, name) for name in type(own).model_fields})
        for measure, own in zip(point.classes, found.classes, strict=True)
    )
    return point.model_copy(update={"classes": tuple(classes), "outside": point.outside.model_copy(update=outside)})
