"""A plan's actions per block: which entry holds what for whom, and whether the plan speaks of this graph at all."""

from __future__ import annotations

from collections.abc import Mapping

from hilore_plan.errors import PlanMismatchError
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.schema.plan import Action, Plan

Actions = Mapping[str, Action]
NOTHING: Actions = {}


class PlanActions:
    """The actions of each block under each entry. Equal groups give the same mapping object.

    Blocks that could not be captured when the plan was made have none: should they be captured now, whatever their
    graph is called, they keep their inputs and recompute the rest, which is what was planned.
    """

    def __init__(self, plan: Plan) -> None:
        opaque = {kind.name for kind in plan.classes if kind.uncaptured is not None}
        self._by_entry = [
            {
                block: NOTHING if group.class_name in opaque else group.actions
                for group in entry.groups
                for block in group.blocks
            }
            for entry in plan.entries
        ]

    def of(self, entry: int | None, block: int) -> Actions:
        """Actions by unit name; none (so: all is recomputed) where no entry fits."""
        return NOTHING if entry is None else self._by_entry[entry].get(block, NOTHING)


def check_units(name: str, graph: BlockGraph, actions: Actions) -> None:
    """Compare the units that a plan speaks of with the graph that runs.

    Raises:
        PlanMismatchError: the plan names units that the graph does not have.
    """
    unknown = sorted(unit for unit in actions if unit not in graph.index)
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        raise PlanMismatchError(
            f"the plan names units that {name} does not have: {shown}",
            "the model runs other code than the one profiled (attention kernel, adapter, version): profile it again",
        )
