"""The best plan at one token count under one limit, and the least peak that any plan can reach there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hilore_plan.planner.greedy import chain, solve_greedy
from hilore_plan.planner.ilp import BlockSolver, least_whole, solve_whole
from hilore_plan.planner.ilp_master import Master
from hilore_plan.planner.ilp_solver import Scale, SolverError, scale_for
from hilore_plan.planner.improve import fill
from hilore_plan.planner.patterns import Column, Pattern, column, named, recompute_all, store_all
from hilore_plan.planner.rooms import Rooms, fits, rooms_at
from hilore_plan.planner.simulate import BlockCost, Simulation, simulate
from hilore_plan.planner.timeline import View

# Shares of the step time. The relaxation's and the choice's together stay well inside the 0.1 % that is promised.
RELAXATION_GAP = 1e-4
CHOICE_GAP = 2e-4
# Up to so many units in all blocks the program is solved as it stands.
WHOLE_UNITS = 80


@dataclass(frozen=True)
class Solved:
    """A plan at one token count: a column per block, what the simulator says, and the gap relative to the step time."""

    columns: tuple[Column, ...]
    simulation: Simulation
    gap: float


@dataclass
class Planner:
    """Solves one profile at several token counts; patterns found at one of them are tried at the next.

    `known` has the patterns of each class found so far.
    """

    solver: str
    known: dict[str, dict[Pattern, None]] = field(default_factory=dict)

    def solve(self, view: View, limit: int) -> Solved | None:
        """The best plan within `limit` bytes; None if there is none."""
        rooms = rooms_at(view, limit)
        if rooms.outside < 0:
            return None
        everything = [store_all(view, index) for index in range(len(view.classes))]
        full = [everything[index] for index in view.class_of]
        if fits(rooms, [block.cost for block in full]):
            return _solved(view, full, limit, 0.0)
        incumbent = solve_greedy(view, rooms)
        scale = scale_for(limit, _most_seconds(view))
        try:
            return self._best(view, rooms, limit, scale, incumbent)
        except SolverError:
            if incumbent is None:
                raise
            seconds = sum(block.cost.seconds for block in incumbent)
            return _solved(view, incumbent, limit, seconds)

    def least(self, view: View) -> Solved:
        """The plan with the least peak."""
        everywhere = [recompute_all(cls) for cls in view.classes]
        base = [column(view, index, everywhere[index]) for index in view.class_of]
        candidates = [base]
        scale = scale_for(_simulated(view, base).peak_bytes, _most_seconds(view))
        rooms = rooms_at(view, 0)
        if _is_small(view):
            patterns = least_whole(view, rooms, scale, self.solver)
            candidates += [] if patterns is None else [_columns(view, patterns)]
        else:
            candidates += self._least_by_patterns(view, rooms, scale)
        plans = [(_simulated(view, columns), columns) for columns in candidates]
        simulation, columns = min(plans, key=lambda plan: plan[0].peak_bytes)
        return Solved(tuple(columns), simulation, 0.0)

    def _best(
        self, view: View, rooms: Rooms, limit: int, scale: Scale, incumbent: list[Column] | None
    ) -> Solved | None:
        blocks = [BlockSolver(view, index, scale, self.solver) for index in range(len(view.classes))]
        find = self._by_whole if _is_small(view) else self._by_patterns
        found, bound = find(view, rooms, scale, blocks, incumbent)
        plans = [plan for plan in (found, incumbent) if plan is not None and fits(rooms, _costs(plan))]
        if not plans:
            least = self.least(view)
            if least.simulation.peak_bytes > limit:
                return None
            plans = [list(least.columns)]
        best = fill(view, rooms, min(plans, key=_seconds), blocks)
        return _solved(view, best, limit, _seconds(best) - bound)

    def _by_whole(
        self,
        view: View,
        rooms: Rooms,
        scale: Scale,
        blocks: Sequence[BlockSolver],
        incumbent: list[Column] | None,
    ) -> tuple[list[Column] | None, float]:
        del blocks, incumbent
        found = solve_whole(view, rooms, scale, self.solver, 0.0)
        return (None, 0.0) if found is None else (_columns(view, found[0]), found[1])

    def _by_patterns(
        self,
        view: View,
        rooms: Rooms,
        scale: Scale,
        blocks: Sequence[BlockSolver],
        incumbent: list[Column] | None,
    ) -> tuple[list[Column] | None, float]:
        master = self._master(view, rooms, scale, blocks)
        step = view.store.step_seconds / scale.second_unit
        relaxed = master.relax(step * RELAXATION_GAP)
        if relaxed is None:
            return None, 0.0
        self._remember(view, master)
        most = _most_seconds(view) if incumbent is None else _seconds(incumbent)
        window = max(most / scale.second_unit - relaxed.bound, 0.0) + step * CHOICE_GAP
        return master.pick(relaxed, window, step * CHOICE_GAP), relaxed.bound * scale.second_unit

    def _least_by_patterns(self, view: View, rooms: Rooms, scale: Scale) -> list[list[Column]]:
        blocks = [BlockSolver(view, index, scale, self.solver) for index in range(len(view.classes))]
        master = self._master(view, rooms, scale, blocks, least=True)
        relaxed = master.relax(0.01)
        chosen = None if relaxed is None else master.pick(relaxed, float("inf"), 1.0)
        return [] if chosen is None else [chosen]

    def _master(
        self, view: View, rooms: Rooms, scale: Scale, blocks: Sequence[BlockSolver], least: bool = False
    ) -> Master:
        master = Master(view, rooms, scale, self.solver, blocks, least)
        for index, cls in enumerate(view.classes):
            known = [column(view, index, pattern) for pattern in self.known.get(cls.name, ())]
            master.add(index, [*chain(view, index), *known])
        return master

    def _remember(self, view: View, master: Master) -> None:
        for cls, pool in zip(view.classes, master.pools, strict=True):
            self.known.setdefault(cls.name, {}).update(dict.fromkeys(candidate.pattern for candidate in pool))


def _is_small(view: View) -> bool:
    return sum(len(view.classes[index].units) for index in view.class_of) <= WHOLE_UNITS


def _costs(columns: Sequence[Column]) -> list[BlockCost]:
    return [block.cost for block in columns]


def _seconds(columns: Sequence[Column]) -> float:
    return sum(block.cost.seconds for block in columns)


def _columns(view: View, patterns: Sequence[Pattern]) -> list[Column]:
    return [column(view, index, pattern) for index, pattern in zip(view.class_of, patterns, strict=True)]


def _most_seconds(view: View) -> float:
    """What recomputing all costs: a measure for the scale of seconds."""
    return _seconds(_columns(view, [recompute_all(view.classes[index]) for index in view.class_of]))


def _simulated(view: View, columns: Sequence[Column]) -> Simulation:
    pairs = zip(view.class_of, columns, strict=True)
    return simulate(view, [named(view.classes[index], block.pattern) for index, block in pairs])


def _solved(view: View, columns: Sequence[Column], limit: int, seconds_over_bound: float) -> Solved:
    simulation = _simulated(view, columns)
    if simulation.peak_bytes > limit:  # cannot happen: `fits` and the simulator say the same
        raise SolverError(f"a plan of {simulation.peak_bytes} bytes came out for a limit of {limit} bytes")
    step = max(simulation.step_seconds, 1e-12)
    return Solved(tuple(columns), simulation, max(0.0, seconds_over_bound) / step)
