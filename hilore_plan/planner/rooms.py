"""How much room a limit leaves to the blocks at each point of the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hilore_plan.planner.simulate import BlockCost
from hilore_plan.planner.timeline import View


@dataclass(frozen=True)
class Rooms:
    """Bytes that blocks may take up, by position.

    `forward[b]` bounds what blocks up to b keep, `backward[b]` what the blocks before b keep plus what b holds in any
    stage, `head` what all blocks keep. `outside` is what is left where no block holds anything: below zero, no plan
    can help.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    head: int
    outside: int


def rooms_at(view: View, limit: int) -> Rooms:
    """The rooms that `limit` bytes of peak memory leave."""
    outside = view.outside
    room = limit - view.fixed_bytes
    early = room - (outside.gradient_bytes if view.accumulation else 0)
    late = room - outside.gradient_bytes
    return Rooms(
        forward=tuple(early - view.classes[index].forward_working_bytes for index in view.class_of),
        backward=tuple(room - view.gradient_bytes(block) for block in view.blocks),
        head=room - view.gradient_bytes(None) - outside.head_working_bytes,
        outside=min(
            late - outside.embedding_working_bytes,
            late + outside.embedding_bytes - outside.optimizer_working_bytes,
        ),
    )


def fits(rooms: Rooms, costs: Sequence[BlockCost]) -> bool:
    """Whether the blocks find room at every point."""
    return excess(rooms, costs) <= 0


def excess(rooms: Rooms, costs: Sequence[BlockCost]) -> int:
    """By how many bytes the blocks are over their room at the point where they are most; not above 0 if they fit."""
    kept, over = 0, -rooms.outside
    for position, cost in enumerate(costs):
        over = max(over, kept + max(stage.total for stage in cost.stages) - rooms.backward[position])
        kept += cost.kept_bytes
        over = max(over, kept - rooms.forward[position])
    return max(over, kept - rooms.head)


def lowered(rooms: Rooms, count: int) -> Rooms:
    """The rooms that a limit lower by `count` bytes leaves."""
    return Rooms(
        forward=tuple(room - count for room in rooms.forward),
        backward=tuple(room - count for room in rooms.backward),
        head=rooms.head - count,
        outside=rooms.outside - count,
    )


def slack_of(rooms: Rooms, costs: Sequence[BlockCost], position: int) -> tuple[int, int]:
    """The most that the block at `position` may keep, and hold in a stage, while the others stay as they are."""
    kept = [cost.kept_bytes for cost in costs]
    before = sum(kept[:position])
    spare = rooms.head - sum(kept)
    total = before
    for later in range(position, len(kept)):
        if later > position:
            most = max(stage.total for stage in costs[later].stages)
            spare = min(spare, rooms.backward[later] - total - most)
        total += kept[later]
        spare = min(spare, rooms.forward[later] - total)
    return kept[position] + spare, rooms.backward[position] - before
