"""Uses up what room a plan has left: each block in turn is solved again, exactly, within the room it really has."""

from __future__ import annotations

from collections.abc import Sequence

from hilore_plan.planner.ilp import BlockSolver
from hilore_plan.planner.ilp_solver import SolverError
from hilore_plan.planner.patterns import Column, Pattern, column
from hilore_plan.planner.risk import Price
from hilore_plan.planner.rooms import Rooms, fits, slack_of

SOLVES = 8  # a bound on the work, not on the quality: patterns from the master leave little to gain


def fill(
    rooms: Rooms, price: Price, columns: Sequence[Column], blocks: Sequence[BlockSolver], enough: float
) -> list[Column]:
    """The plan with its leftover room used, never slower than the one given; not tried further at `enough` seconds.

    Seconds include the price of risk.
    """
    chosen = list(columns)
    tried: set[tuple[int, Pattern, tuple[int, int, int]]] = set()
    changed = True
    while changed:
        changed = False
        for place, index in enumerate(price.view.class_of):
            if price.seconds(place, chosen[place]) == 0 or price.total(chosen) <= enough:
                continue
            slack = slack_of(rooms, [block.cost for block in chosen], place)
            key = place if price.price else index, chosen[place].pattern, slack
            if key in tried or len(tried) == SOLVES:
                continue
            tried.add(key)
            changed |= _replace(rooms, price, chosen, place, _within(price, blocks, place, slack))
    return chosen


def _within(price: Price, blocks: Sequence[BlockSolver], place: int, slack: tuple[int, int, int]) -> Column | None:
    view, index = price.view, price.view.class_of[place]
    try:
        pattern = blocks[index].within(*slack, price.price, view.rho[place])
    except SolverError:
        return None
    return None if pattern is None else column(view, index, pattern)


def _replace(rooms: Rooms, price: Price, chosen: list[Column], place: int, better: Column | None) -> bool:
    """Put a better column in its place if the whole plan still fits; what the solver says is not taken on trust."""
    before = chosen[place]
    if better is None or price.seconds(place, better) >= price.seconds(place, before):
        return False
    chosen[place] = better
    if fits(rooms, [block.cost for block in chosen]):
        return True
    chosen[place] = before
    return False
