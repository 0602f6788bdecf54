"""In which order backward asks for the values of a block, and what it holds beside them as it goes on.

All bytes here are beyond the values of the stage: those with slots in it, whether they were kept or are rebuilt. What
backward lets go of is taken off, be it such a value; so the figures hold for any plan that has the same values there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hilore_plan.planner.between import Between
from hilore_plan.schema.profile import BlockClass


@dataclass(frozen=True)
class Request:
    """Backward asks for a value for the first time: what it holds at that moment, and at the most until the next."""

    value: int
    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class StageView:
    """One stage of a block's backward: the most that it holds before the first request, and the requests in order."""

    early_bytes: int
    requests: tuple[Request, ...]

    def peak_before(self, number: int) -> int:
        """The most that is held before request `number`."""
        return max([self.early_bytes, *(request.peak_bytes for request in self.requests[:number])])

    def peak_from(self, number: int) -> int:
        """The most that is held from request `number` on."""
        return max((request.peak_bytes for request in self.requests[number:]), default=0)


def stage_views(cls: BlockClass, between: Between, index: int) -> tuple[StageView, ...]:
    """The stages of class number `index`; where nobody looked, the stage's working memory is held all the time."""
    low, high = between.low.classes[index], between.high.classes[index]
    working = between.counts(lambda point: point.classes[index].stage_working_bytes)
    known = bool(low.asked_values) and low.asked_values == high.asked_values
    slots = [[n for n, value in enumerate(cls.values) if stage in value.slot_stages] for stage in range(cls.stages)]
    if not known:
        return tuple(
            StageView(most, tuple(Request(value, most, most) for value in each))
            for most, each in zip(working, slots, strict=True)
        )
    return tuple(
        StageView(early, (*requests, *(Request(value, 0, 0) for value in each if value not in low.asked_values[stage])))
        for stage, (each, (early, requests)) in enumerate(zip(slots, _measured(between, index, working), strict=True))
    )


def _measured(between: Between, index: int, working: tuple[int, ...]) -> Iterator[tuple[int, tuple[Request, ...]]]:
    """By stage the bytes before the first request, and the requests that were seen."""
    peaked = all(point.classes[index].asked_peaks for point in (between.low, between.high))
    for stage, values in enumerate(between.low.classes[index].asked_values):
        held = between.counts(lambda point, s=stage: point.classes[index].asked_bytes[s])  # type: ignore[misc]
        if peaked:
            early, *peaks = between.counts(lambda point, s=stage: point.classes[index].asked_peaks[s])  # type: ignore[misc]
        else:
            early, *peaks = [working[stage]] * (len(values) + 1)
        yield early, tuple(map(Request, values, held, peaks))
