"""Patterns: one action per unit of a block, in the order of the class's `units`, with what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import le

from hilore_plan.planner.block_cost import BlockCost, block_cost
from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.timeline import View
from hilore_plan.schema.plan import Action, codec_of

Pattern = tuple[Action, ...]


@dataclass(frozen=True)
class Column:
    """A pattern and its cost, as the simulator gives it; `codes` are the values that it compresses, with the action."""

    pattern: Pattern
    cost: BlockCost
    codes: tuple[tuple[int, Action], ...] = ()


def named(cls: ClassView, pattern: Pattern) -> dict[str, Action]:
    """The pattern as the plan document has it: action by name of unit."""
    return {cls.names[unit]: action for unit, action in zip(cls.units, pattern, strict=True)}


def column(view: View, index: int, pattern: Pattern) -> Column:
    """A pattern of class number `index` with its cost at a view."""
    pairs = zip(view.classes[index].units, pattern, strict=True)
    codes = tuple((unit, action) for unit, action in pairs if codec_of(action) is not None)
    return Column(pattern, block_cost(view, index, pattern), codes)


def recompute_all(cls: ClassView) -> Pattern:
    """Keep only what nothing can rebuild: the inputs, and what random ops and the like have made."""
    stuck = _stuck(cls)
    actions: list[Action] = ["store" if unit in stuck else "recompute" for unit in cls.units]
    return tuple(actions)


def store_all(view: View, index: int) -> Column:
    """Keep every slot; other inputs only if something has to be rebuilt from them all the same."""
    cls = view.classes[index]
    everything: list[Action] = ["store"] * len(cls.units)
    slots_only: list[Action] = ["store" if cls.slots[unit] else "recompute" for unit in cls.units]
    try:
        return column(view, index, tuple(slots_only))
    except UnrecoverableError:
        return column(view, index, tuple(everything))


def pareto(columns: Sequence[Column], rhos: Sequence[Mapping[tuple[int, Action], float]] = ()) -> list[Column]:
    """The columns that no other one beats in seconds, kept bytes, all bytes held and all of `rhos` at once."""
    measured = sorted((_measures(column, rhos), number) for number, column in enumerate(columns))
    front: list[tuple[float, ...]] = []
    best = []
    for sizes, number in measured:
        if not any(all(map(le, other, sizes)) for other in front):
            front.append(sizes)
            best.append(columns[number])
    return best


def _measures(candidate: Column, rhos: Sequence[Mapping[tuple[int, Action], float]]) -> tuple[float, ...]:
    cost = candidate.cost
    risks = (sum(rho[code] for code in candidate.codes) for rho in rhos)
    return (cost.seconds, cost.kept_bytes, *cost.held_bytes, *risks)


def _stuck(cls: ClassView) -> set[int]:
    """Units that cannot be rebuilt even when all that must be kept is kept."""
    stuck = {unit for unit in cls.units if unit in cls.forced or cls.makers[unit] is None}
    there = set(cls.free) | set(cls.forced) | stuck
    for op in cls.ops:
        if op.recomputable and all(value in there for value in op.inputs):
            there.update(op.outputs)
            continue
        lost = [value for value in op.outputs if value in cls.units]
        stuck.update(lost)
        there.update(lost)
    return stuck
