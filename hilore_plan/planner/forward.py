"""What a block's forward holds while it runs, whatever the plan keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

from hilore_plan.planner.between import Between
from hilore_plan.schema.profile import BlockClass


@dataclass(frozen=True)
class Moment:
    """A time in forward: what a forward that keeps nothing holds at the most, and the values it has `saved` by then.

    Of these it has let go of those that are `gone`: they count only where they are kept.
    """

    peak_bytes: int
    saved: frozenset[int]
    gone: frozenset[int]


@dataclass(frozen=True)
class ForwardView:
    """The block's own input, which is there all the time, and the moments at which forward may hold most."""

    input_bytes: int
    moments: tuple[Moment, ...]


def forward_view(cls: BlockClass, between: Between, index: int) -> ForwardView | None:
    """The forward of class number `index`; None where nobody looked."""
    low, high = between.low.classes[index], between.high.classes[index]
    if not low.forward_peaks or not high.forward_peaks or low.forward_values != high.forward_values:
        return None
    sizes = between.counts(lambda point: point.classes[index].value_bytes)
    own = sum(size for value, size in zip(cls.values, sizes, strict=True) if value.kind == "input" and not value.shared)
    first, *peaks = between.counts(lambda point: point.classes[index].forward_peaks)
    moments = [Moment(first, frozenset(), frozenset())]
    for value, peak in zip(low.forward_values, peaks, strict=True):
        saved, gone = moments[-1].saved, moments[-1].gone
        moments.append(Moment(peak, saved | {value}, gone | {value} if value in saved else gone))
    return ForwardView(own, _telling(moments))


def _telling(moments: list[Moment]) -> tuple[Moment, ...]:
    """Those that can hold most under some plan: only later ones that hold less have more on top."""
    telling: list[Moment] = []
    for moment in reversed(moments):
        if not telling or moment.peak_bytes > telling[-1].peak_bytes:
            telling.append(moment)
    return tuple(reversed(telling))
