"""The independent simulator: what a set of actions costs, in integer bytes at every point of the timeline.

It plays a step as the runtime does, stage by stage, and knows nothing of the integer program's constraints. Every
solution passes through it before it becomes a plan, because solvers work in floats and can be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hilore_plan.planner.block_cost import BlockCost, block_cost
from hilore_plan.planner.timeline import View, backward_point, forward_point
from hilore_plan.schema.plan import Action


@dataclass(frozen=True)
class PointBytes:
    """The memory at one point of the timeline, by what holds it."""

    name: str
    fixed: int
    gradients: int
    kept: int
    rebuilt: int
    working: int

    @property
    def total(self) -> int:
        """All of it: what `max_memory_allocated` would see."""
        return self.fixed + self.gradients + self.kept + self.rebuilt + self.working


@dataclass(frozen=True)
class Simulation:
    """What a plan costs at one token count. `binding` is the first point that reaches the peak."""

    points: tuple[PointBytes, ...]
    peak_bytes: int
    binding: str
    step_seconds: float
    recompute_seconds: float


def simulate(view: View, actions: Sequence[Mapping[str, Action]]) -> Simulation:
    """Play one step under `actions`, one mapping from unit name to action per block of `view.blocks`.

    Raises:
        UnrecoverableError: if a saved tensor can neither be found nor be rebuilt.
    """
    return assemble(view, block_costs(view, actions))


def timeline(view: View, actions: Sequence[Mapping[str, Action]]) -> tuple[PointBytes, ...]:
    """The bytes at every point, in the order of time and split by what holds them: made for looking at."""
    return simulate(view, actions).points


def block_costs(view: View, actions: Sequence[Mapping[str, Action]]) -> list[BlockCost]:
    """The cost of each block; blocks of one class that are treated alike are computed once."""
    known: dict[tuple[int, tuple[Action, ...]], BlockCost] = {}
    costs = []
    for index, chosen in zip(view.class_of, actions, strict=True):
        cls = view.classes[index]
        key = index, tuple(chosen[cls.names[unit]] for unit in cls.units)
        if key not in known:
            known[key] = block_cost(view, index, key[1])
        costs.append(known[key])
    return costs


def assemble(view: View, costs: Sequence[BlockCost]) -> Simulation:
    """Put the costs of the blocks, in the order of `view.blocks`, on the timeline."""
    points = (*_forward(view, costs), *_backward(view, costs), *_after(view))
    peak = max(points, key=lambda point: point.total)
    recompute = sum(cost.seconds for cost in costs)
    return Simulation(points, peak.total, peak.name, view.store.step_seconds + recompute, recompute)


def _forward(view: View, costs: Sequence[BlockCost]) -> list[PointBytes]:
    outside = view.outside
    early = outside.gradient_bytes if view.accumulation else 0
    points, kept = [], 0
    for position, block in enumerate(view.blocks):
        run = costs[position].forward
        points.append(PointBytes(forward_point(block), view.fixed_bytes, early, kept + run.kept, 0, run.working))
        kept += costs[position].kept_bytes
    head = PointBytes("head", view.fixed_bytes, view.gradient_bytes(None), kept, 0, outside.head_working_bytes)
    return [*points, head]


def _backward(view: View, costs: Sequence[BlockCost]) -> list[PointBytes]:
    points = []
    earlier = sum(cost.kept_bytes for cost in costs)
    for position in reversed(range(len(view.blocks))):
        block, cost = view.blocks[position], costs[position]
        earlier -= cost.kept_bytes
        gradients = view.gradient_bytes(block)
        for number, stage in enumerate(cost.stages):
            name = backward_point(block, number)
            held = earlier + stage.kept
            points.append(PointBytes(name, view.fixed_bytes, gradients, held, stage.rebuilt, stage.working))
    return points


def _after(view: View) -> list[PointBytes]:
    outside = view.outside
    gradients = outside.gradient_bytes
    without_embedding = view.fixed_bytes - outside.embedding_bytes
    return [
        PointBytes("embedding", view.fixed_bytes, gradients, 0, 0, outside.embedding_working_bytes),
        PointBytes("optimizer", without_embedding, gradients, 0, 0, outside.optimizer_working_bytes),
    ]
