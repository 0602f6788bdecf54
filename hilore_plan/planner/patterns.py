"""Patterns: one action per unit of a block, in the order of the class's `units`, with what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hilore_plan.planner.simulate import BlockCost, UnrecoverableError, block_cost
from hilore_plan.planner.timeline import ClassView, View
from hilore_plan.schema.plan import Action

Pattern = tuple[Action, ...]


@dataclass(frozen=True)
class Column:
    """A pattern and its cost, as the simulator gives it."""

    pattern: Pattern
    cost: BlockCost


def named(cls: ClassView, pattern: Pattern) -> dict[str, Action]:
    """The pattern as the plan document has it: action by name of unit."""
    return {cls.names[unit]: action for unit, action in zip(cls.units, pattern, strict=True)}


def column(view: View, index: int, pattern: Pattern) -> Column:
    """A pattern of class number `index` with its cost at a view."""
    return Column(pattern, block_cost(view, index, pattern))


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


def pareto(columns: Sequence[Column]) -> list[Column]:
    """The columns that no other one beats in seconds, kept bytes and every stage's bytes at once."""
    ordered = sorted(columns, key=_measures)
    front: list[Column] = []
    for candidate in ordered:
        sizes = _measures(candidate)
        if not any(all(a <= b for a, b in zip(_measures(other), sizes, strict=True)) for other in front):
            front.append(candidate)
    return front


def _measures(candidate: Column) -> tuple[float, ...]:
    cost = candidate.cost
    return (cost.seconds, cost.kept_bytes, *(stage.total for stage in cost.stages))


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
