"""The simple way: from "all recompute" on, always keep the unit that saves the most seconds per byte.

The integer program starts from its patterns and is never allowed to do worse.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.patterns import Column, Pattern, column, recompute_all
from hilore_plan.planner.rooms import Rooms, fits
from hilore_plan.planner.timeline import View

Worth = Callable[[Column, Column], float]


def seconds_per_byte(before: Column, after: Column) -> float:
    """Seconds saved per byte more that is kept."""
    saved = before.cost.seconds - after.cost.seconds
    return saved / max(after.cost.kept_bytes - before.cost.kept_bytes, 1)


def chain(view: View, index: int, worth: Worth = seconds_per_byte) -> list[Column]:
    """Patterns of one class from "all recompute" on, each keeping one unit more, the best saver first."""
    columns = [column(view, index, recompute_all(view.classes[index]))]
    while (better := _best_step(view, index, columns[-1], worth)) is not None:
        columns.append(better)
    return columns


def solve_greedy(
    view: View,
    rooms: Rooms,
    chains: Sequence[Sequence[Column]],
    worth: Worth = seconds_per_byte,
    allowed: Callable[[Sequence[Column]], bool] | None = None,
) -> list[Column] | None:
    """The greedy plan, one column per block, along the `chain` of each class; None if not even its first finds room.

    Args:
        view: the profile.
        rooms: what the plan has to fit into.
        chains: by class.
        worth: what a step along a chain is worth.
        allowed: what else a plan has to meet.
    """
    steps = [0] * len(view.blocks)
    chosen = [chains[index][0] for index in view.class_of]
    if not fits(rooms, [block.cost for block in chosen]):
        return None
    queue = [_step(chains[index], 0, position, worth) for position, index in enumerate(view.class_of)]
    heapq.heapify(queue)
    while queue:
        negative, position = heapq.heappop(queue)
        columns = chains[view.class_of[position]]
        if negative == 0 or steps[position] + 1 == len(columns):
            continue
        before = chosen[position]
        chosen[position] = columns[steps[position] + 1]
        if not fits(rooms, [block.cost for block in chosen]) or (allowed is not None and not allowed(chosen)):
            chosen[position] = before
            continue
        steps[position] += 1
        heapq.heappush(queue, _step(columns, steps[position], position, worth))
    return chosen


def _step(columns: Sequence[Column], step: int, position: int, worth: Worth) -> tuple[float, int]:
    """The (negative, for a heap) worth of the next step of a block."""
    if step + 1 == len(columns):
        return 0.0, position
    return -worth(columns[step], columns[step + 1]), position


def _best_step(view: View, index: int, now: Column, worth: Worth) -> Column | None:
    """The best single unit to keep, in whichever form; where none saves time, the best that a later one may need."""
    candidates = []
    for pattern in _neighbours(view.classes[index], now.pattern):
        try:
            candidate = column(view, index, pattern)
        except UnrecoverableError:
            continue
        if candidate.cost.seconds < now.cost.seconds:
            candidates.append(candidate)
    return max(candidates, key=lambda candidate: worth(now, candidate), default=None)


def _neighbours(cls: ClassView, pattern: Pattern) -> list[Pattern]:
    return [
        (*pattern[:place], action, *pattern[place + 1 :])
        for place, unit in enumerate(cls.units)
        for action in ("store", *(form.action for form in cls.forms[unit]))
        if pattern[place] == "recompute"
    ]
