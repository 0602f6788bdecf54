"""The best plan at one token count under one limit, and the least peak that any plan can reach there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hilore_plan.planner.greedy import chain, solve_greedy
from hilore_plan.planner.ilp import BlockSolver, least_whole, solve_whole
from hilore_plan.planner.ilp_master import Master
from hilore_plan.planner.ilp_solver import Scale, SolverError, scale_for
from hilore_plan.planner.improve import fill
from hilore_plan.planner.patterns import Column, Pattern, column, named, recompute_all, store_all
from hilore_plan.planner.rooms import Rooms, fits, rooms_at
from hilore_plan.planner.simulate import Simulation, simulate
from hilore_plan.planner.timeline import View

# Shares of the step time; both together stay well inside the 0.1 % that is promised.
RELAXATION_GAP = 1e-4
CHOICE_GAP = 4e-4
ENOUGH_GAP = 1e-4  # a plan this near to its bound is not improved further
# Up to so many units in all blocks the program is solved as it stands, to the optimum.
WHOLE_UNITS = 80

Known = dict[str, dict[Pattern, None]]


@dataclass(frozen=True)
class Solved:
    """A plan at one token count: a column per block, what the simulator says, and the gap relative to the step time."""

    columns: tuple[Column, ...]
    simulation: Simulation
    gap: float


@dataclass
class Planner:
    """Solves one profile at several token counts; patterns found at one of them (`known`) are tried at the next."""

    solver: str
    known: Known = field(default_factory=dict)

    def solve(self, view: View, limit: int) -> Solved | None:
        """The best plan within `limit` bytes; None if there is none."""
        rooms = rooms_at(view, limit)
        if rooms.outside < 0:
            return None
        full = _everywhere(view, [store_all(view, index) for index in range(len(view.classes))])
        if fits(rooms, [block.cost for block in full]):
            return _solved(view, full, limit, 0.0)
        task = _Task(view, rooms, scale_for(limit, _most_seconds(view)), self.solver, self.known)
        best, bound = task.best()
        if best is None:
            least = self.least(view)
            if least.simulation.peak_bytes > limit:
                return None
            best = list(least.columns)
        return _solved(view, task.improved(best, bound), limit, bound)

    def least(self, view: View) -> Solved:
        """The plan with the least peak."""
        base = _everywhere(view, _recompute_all(view))
        scale = scale_for(_simulated(view, base).peak_bytes, _most_seconds(view))
        found = _Task(view, rooms_at(view, 0), scale, self.solver, self.known).least()
        plans = [(_simulated(view, columns), columns) for columns in (found, base) if columns is not None]
        simulation, columns = min(plans, key=lambda plan: plan[0].peak_bytes)
        return Solved(tuple(columns), simulation, 0.0)


@dataclass(frozen=True)
class _Task:
    """One view under one limit: what its solutions have in common."""

    view: View
    rooms: Rooms
    scale: Scale
    solver: str
    known: Known

    @cached_property
    def blocks(self) -> list[BlockSolver]:
        return [BlockSolver(self.view, index, self.scale, self.solver) for index in range(len(self.view.classes))]

    @cached_property
    def chains(self) -> list[list[Column]]:
        return [chain(self.view, index) for index in range(len(self.view.classes))]

    @property
    def _is_small(self) -> bool:
        return sum(len(self.view.classes[index].units) for index in self.view.class_of) <= WHOLE_UNITS

    def best(self) -> tuple[list[Column] | None, float]:
        """The fastest plan found, if any, and a lower bound on the seconds of all plans.

        The solver's plan is taken only if the simulator finds it to fit; the greedy one stands in for it if need be.
        """
        greedy = solve_greedy(self.view, self.rooms, self.chains)
        try:
            found, bound = self._by_whole() if self._is_small else self._by_patterns(greedy)
        except SolverError:
            found, bound = None, 0.0
        plans = [plan for plan in (found, greedy) if plan is not None and self._fits(plan)]
        return min(plans, key=_seconds, default=None), bound

    def improved(self, columns: list[Column], bound: float) -> list[Column]:
        """The plan with its leftover room used, if there is anything to gain."""
        enough = bound + ENOUGH_GAP * self.view.store.step_seconds
        return fill(self.view, self.rooms, columns, self.blocks, enough)

    def least(self) -> list[Column] | None:
        """The plan with the least peak as the solver finds it; the limit has to be 0."""
        try:
            if not self._is_small:
                return self._least_by_patterns()
            patterns = least_whole(self.view, self.rooms, self.scale, self.solver)
        except SolverError:
            return None
        return None if patterns is None else self._columns(patterns)

    def _fits(self, columns: Sequence[Column]) -> bool:
        return fits(self.rooms, [block.cost for block in columns])

    def _columns(self, patterns: Sequence[Pattern]) -> list[Column]:
        pairs = zip(self.view.class_of, patterns, strict=True)
        return [column(self.view, index, pattern) for index, pattern in pairs]

    def _by_whole(self) -> tuple[list[Column] | None, float]:
        found = solve_whole(self.view, self.rooms, self.scale, self.solver, 0.0)
        return (None, 0.0) if found is None else (self._columns(found[0]), found[1])

    def _by_patterns(self, greedy: list[Column] | None) -> tuple[list[Column] | None, float]:
        master = self._master(least=False)
        step = self.view.store.step_seconds / self.scale.second_unit
        relaxed = master.relax(step * RELAXATION_GAP)
        if relaxed is None:
            return None, 0.0
        master.refine(relaxed)
        self._remember(master)
        most = _most_seconds(self.view) if greedy is None else _seconds(greedy)
        window = max(most / self.scale.second_unit - relaxed.bound, 0.0) + step * RELAXATION_GAP
        return master.pick(relaxed, window, step * CHOICE_GAP), relaxed.bound * self.scale.second_unit

    def _least_by_patterns(self) -> list[Column] | None:
        master = self._master(least=True)
        relaxed = master.relax(0.01)
        return None if relaxed is None else master.pick_least(1.0)

    def _master(self, *, least: bool) -> Master:
        master = Master(self.view, self.rooms, self.scale, self.solver, self.blocks, least)
        for index, cls in enumerate(self.view.classes):
            known = [column(self.view, index, pattern) for pattern in self.known.get(cls.name, ())]
            master.add(index, [*self.chains[index], *known])
        return master

    def _remember(self, master: Master) -> None:
        for cls, pool in zip(self.view.classes, master.pools, strict=True):
            self.known.setdefault(cls.name, {}).update(dict.fromkeys(candidate.pattern for candidate in pool))


def _recompute_all(view: View) -> list[Column]:
    return [column(view, index, recompute_all(cls)) for index, cls in enumerate(view.classes)]


def _everywhere(view: View, by_class: Sequence[Column]) -> list[Column]:
    return [by_class[index] for index in view.class_of]


def _seconds(columns: Sequence[Column]) -> float:
    return sum(block.cost.seconds for block in columns)


def _most_seconds(view: View) -> float:
    """What recomputing all costs: a measure for the scale of seconds."""
    return _seconds(_everywhere(view, _recompute_all(view)))


def _simulated(view: View, columns: Sequence[Column]) -> Simulation:
    pairs = zip(view.class_of, columns, strict=True)
    return simulate(view, [named(view.classes[index], block.pattern) for index, block in pairs])


def _solved(view: View, columns: Sequence[Column], limit: int, bound: float) -> Solved:
    simulation = _simulated(view, columns)
    if simulation.peak_bytes > limit:  # cannot happen: `fits` and the simulator say the same
        raise SolverError(f"a plan of {simulation.peak_bytes} bytes came out for a limit of {limit} bytes")
    over = max(0.0, simulation.recompute_seconds - bound)
    return Solved(tuple(columns), simulation, over / max(simulation.step_seconds, 1e-12))
