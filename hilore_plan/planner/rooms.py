"""How much room a limit leaves to the blocks at each point of the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from hilore_plan.planner.block_cost import BlockCost
from hilore_plan.planner.timeline import View


@dataclass(frozen=True)
class Rooms:
    """Bytes that blocks may take up, by position.

    `forward[b]` bounds what the blocks before b keep plus what b holds in its forward, `backward[b]` the same for any
    stage of its backward, `head` what all blocks keep. `outside` is what is left where no block holds anything: below
    zero, no plan can help.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    head: int
    outside: int

    def held(self, position: int) -> Iterator[int]:
        """The bounds for what a block holds, in the order of `BlockCost.held_bytes`: its forward, and any stages."""
        return chain([self.forward[position]], repeat(self.backward[position]))

    def slack(self, cost: BlockCost, position: int) -> int:
        """The most that the blocks before a position may keep if the block there costs so much; may be below zero."""
        return min(room - held for held, room in zip(cost.held_bytes, self.held(position), strict=False))


def rooms_at(view: View, limit: int) -> Rooms:
    """The rooms that `limit` bytes of peak memory leave."""
    outside = view.outside
    room = limit - view.fixed_bytes
    early = room - (outside.gradient_bytes if view.accumulation else 0)
    late = room - outside.gradient_bytes
    return Rooms(
        forward=(early,) * len(view.blocks),
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
        over = max(over, kept - rooms.slack(cost, position))
        kept += cost.kept_bytes
    return max(over, kept - rooms.head)


def lowered(rooms: Rooms, count: int) -> Rooms:
    """The rooms that a limit lower by `count` bytes leaves."""
    return Rooms(
        forward=tuple(room - count for room in rooms.forward),
        backward=tuple(room - count for room in rooms.backward),
        head=rooms.head - count,
        outside=rooms.outside - count,
    )


def slack_of(rooms: Rooms, costs: Sequence[BlockCost], position: int) -> tuple[int, int, int]:
    """The most that the block at `position` may keep, and hold in forward and in a stage, while the others stay."""
    kept = [cost.kept_bytes for cost in costs]
    before = sum(kept[:position])
    spare = rooms.head - sum(kept)
    total = before
    for later in range(position, len(kept)):
        if later > position:
            spare = min(spare, rooms.slack(costs[later], later) - total)
        total += kept[later]
    return kept[position] + spare, rooms.forward[position] - before, rooms.backward[position] - before
