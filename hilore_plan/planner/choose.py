"""Picks one pattern per block from given pools, by dynamic programming over the blocks in forward order.

Of two choices for the blocks up to b, the one that keeps no more bytes and takes no more time is as good for all that
follows, because a block's stages matter only when it is placed. So only the Pareto front of (bytes kept, seconds) is
carried on. Equal blocks, over which a branch-and-bound tree explodes, cost nothing extra here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hilore_plan.planner.patterns import Column
from hilore_plan.planner.risk import Price
from hilore_plan.planner.rooms import Rooms


class _State(NamedTuple):
    """A choice for the blocks so far: what it keeps and takes, the state before it, and its last block's column."""

    kept: int
    seconds: float
    parent: int
    column: int


def choose(rooms: Rooms, price: Price, pools: Sequence[Sequence[Column]], bands: int) -> list[Column] | None:
    """The fastest choice of one column per block, from one pool per block; None if none finds room.

    The front is thinned to the two ends of each of `bands` bands of bytes. Bytes are never rounded, so that thinning
    can lose a little time but not break a limit.
    """
    if rooms.outside < 0:
        return None
    fronts = [[_State(0, 0.0, 0, 0)]]
    for place, pool in enumerate(pools):
        seconds = [price.seconds(place, candidate) for candidate in pool]
        front = _extended(fronts[-1], pool, seconds, rooms, place)
        if not front:
            return None
        fronts.append(_thinned(front, bands))
    return _traced(fronts, pools)


def _extended(
    front: Sequence[_State], pool: Sequence[Column], costs: Sequence[float], rooms: Rooms, place: int
) -> list[_State]:
    """The front with one block more: bytes ascend and seconds descend."""
    sizes = [
        (number, found.cost.kept_bytes, rooms.slack(found.cost, place), seconds)
        for number, (found, seconds) in enumerate(zip(pool, costs, strict=True))
    ]
    states = [
        _State(state.kept + kept, state.seconds + seconds, parent, number)
        for parent, state in enumerate(front)
        for number, kept, before, seconds in sizes
        if state.kept <= before and state.kept + kept <= rooms.head
    ]
    states.sort()
    best, fastest = [], float("inf")
    for state in states:
        if state.seconds < fastest:
            best.append(state)
            fastest = state.seconds
    return best


def _thinned(front: list[_State], bands: int) -> list[_State]:
    """The two ends of each band."""
    if len(front) <= 2 * bands:
        return front
    width = max(1, (front[-1].kept - front[0].kept) // bands)
    band = [(state.kept - front[0].kept) // width for state in front]
    last = len(front) - 1
    return [
        state
        for place, state in enumerate(front)
        if place in (0, last) or band[place] != band[place - 1] or band[place] != band[place + 1]
    ]


def _traced(fronts: Sequence[Sequence[_State]], pools: Sequence[Sequence[Column]]) -> list[Column]:
    """Follow the fastest end back to the start."""
    chosen = []
    state = fronts[-1][-1]
    for front, pool in zip(reversed(fronts[:-1]), reversed(pools), strict=True):
        chosen.append(pool[state.column])
        state = front[state.parent]
    return chosen[::-1]
