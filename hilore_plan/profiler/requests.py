"""What backward was seen to hold beyond a stage's values, and when it first asked for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hilore_plan.profiler.memory import Segment

Slot = tuple[int, int]


@dataclass
class StageRequests:
    """One stage: the most bytes before the first request, and for each value those at its first and until the next.

    Values are in the order in which they are asked for; nothing falls below 0.
    """

    early_bytes: int = 0
    held_bytes: dict[int, int] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)

    def see(self, value: int, held_bytes: int) -> None:
        """The value is asked for; of several times, in several blocks, the one that holds most counts."""
        self.held_bytes[value] = max(self.held_bytes.get(value, 0), held_bytes)
        self.peak_bytes.setdefault(value, 0)

    def reach(self, value: int | None, peak_bytes: int) -> None:
        """So much is held after the request for a value, or before any."""
        if value is None:
            self.early_bytes = max(self.early_bytes, peak_bytes)
        else:
            self.peak_bytes[value] = max(self.peak_bytes[value], peak_bytes)


def read_requests(
    segments: Iterable[Segment], slots: Callable[[int], Slot], known: Callable[[int], int], stages: list[StageRequests]
) -> None:
    """Add what one backward of a block shows.

    Args:
        segments: those of the block's backward, in order; see `watch` for their names.
        slots: the stage and value of a slot.
        known: what the timeline adds up for store-everything in a stage.
        stages: where it goes.
    """
    seen: set[Slot] = set()
    latest: dict[int, int] = {}
    for segment in segments:
        stage, *asked = map(int, segment.name.split(":")[2:])
        for own, value in map(slots, asked):  # none in the segment before the first request
            if (own, value) not in seen:
                seen.add((own, value))
                stages[own].see(value, segment.live_bytes - known(own))
                if own == stage:
                    latest[stage] = value
        stages[stage].reach(latest.get(stage), segment.peak_bytes - known(stage))
