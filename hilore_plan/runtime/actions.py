"""A plan's actions per block: which entry holds what for whom, and whether the plan speaks of this graph at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hilore_plan.errors import PlanMismatchError
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.schema.plan import Action, Plan, codec_of

Actions = Mapping[str, Action]
NOTHING: Actions = {}
INPUT, KERNEL = "input.", ".sdpa.out"


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

    def may_compress(self, block: int, unit: str) -> bool:
        """Whether any entry compresses this unit of this block."""
        return any(codec_of(actions.get(block, NOTHING).get(unit, "")) for actions in self._by_entry)


def check_units(name: str, graph: BlockGraph, actions: Actions) -> bool:
    """Compare the units that a plan speaks of with the graph that runs.

    Whether a call has a mask depends on its rows: transformers leaves out one that hides nothing. Such a call lacks an
    input of the plan's and what attention makes of it, but runs the same kernel.

    Returns:
        Whether the graph has all of the plan's units, so that others need not be compared.

    Raises:
        PlanMismatchError: the plan names units that the graph does not have.
    """
    unknown = sorted(unit for unit in actions if unit not in graph.index)
    if not unknown:
        return True
    if any(unit.startswith(INPUT) for unit in unknown) and _kernels(graph.index) == _kernels(actions) != set():
        return False
    shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
    raise PlanMismatchError(
        f"the plan names units that {name} does not have: {shown}",
        "the model runs other code than the one profiled (attention kernel, adapter, version): profile it again",
    )


def _kernels(units: Iterable[str]) -> set[str]:
    """Outputs of fused attention kernels; eager attention has none."""
    return {unit for unit in units if unit.endswith(KERNEL)}
