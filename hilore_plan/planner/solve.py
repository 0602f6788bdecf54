"""The best plan at one token count, under one limit and price of risk, and the least peak that any plan can reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hilore_plan.planner.greedy import chain, solve_greedy
from hilore_plan.planner.groups import FEW_GROUPS, MANY_GROUPS, Groups, grouped
from hilore_plan.planner.ilp import BlockSolver, least_whole, solve_whole
from hilore_plan.planner.ilp_master import Master
from hilore_plan.planner.ilp_solver import Scale, SolverError, scale_for
from hilore_plan.planner.improve import fill
from hilore_plan.planner.patterns import Column, Pattern, column, named, recompute_all, store_all
from hilore_plan.planner.risk import Price, exact_view, total_risk
from hilore_plan.planner.rooms import excess, fits, lowered, rooms_at
from hilore_plan.planner.simulate import Simulation, simulate
from hilore_plan.planner.timeline import View

# Shares of the step time; both together stay well inside the 0.1 % that is promised.
RELAXATION_GAP = 1e-4
CHOICE_GAP = 4e-4
ENOUGH_GAP = 1e-4  # a plan this near to its bound is not improved further
TRIES = 6  # how often a plan may come out over its limit by the solver's tolerance
# Up to so many units in all blocks the program is solved as it stands, to the optimum.
WHOLE_UNITS = 80

Known = dict[str, dict[Pattern, None]]


@dataclass(frozen=True)
class Solved:
    """A plan at one token count: a column per block, what the simulator says, its squared error, and how good it is.

    `bound` is what every plan costs at least in seconds beyond the store-everything step, the price of risk included;
    `gap` how much more this one costs, relative to the step time.
    """

    columns: tuple[Column, ...]
    simulation: Simulation
    risk: float
    bound: float
    gap: float


@dataclass
class Planner:
    """Solves one profile at several token counts; patterns found at one of them (`known`) are tried at the next."""

    solver: str
    known: Known = field(default_factory=dict)

    def at(self, view: View, limit: int) -> Site:
        """A view under a limit, to be solved at several prices of risk."""
        return Site(view, limit, self)

    def solve(self, view: View, limit: int, price: float = 0.0) -> Solved | None:
        """The best plan within `limit` bytes, where risk costs `price` seconds per unit; None if there is none."""
        return self.at(view, limit).solve(price)

    def least(self, view: View) -> Solved:
        """The plan with the least peak."""
        base = _everywhere(view, _recompute_all(view))
        site = Site(view, 0, self, scale_for(_simulated(view, base).peak_bytes, _most_seconds(view)))
        found = _Task(site, Price(view)).least()
        plans = [(_simulated(view, columns), columns) for columns in (found, base) if columns is not None]
        simulation, columns = min(plans, key=lambda plan: plan[0].peak_bytes)
        return Solved(tuple(columns), simulation, total_risk(view, columns), 0.0, 0.0)


class Site:
    """One view under one limit: what its solutions at all prices have in common, and the plans found there so far."""

    def __init__(self, view: View, limit: int, planner: Planner, scale: Scale | None = None) -> None:
        self.view, self.limit, self.planner = view, limit, planner
        self.rooms = rooms_at(view, limit)
        self.scale = scale or scale_for(limit, _most_seconds(view))
        self.plans: list[list[Column]] = []
        self.groups: dict[int, Groups] = {}

    def solve(self, price: float = 0.0, *, fine: bool = False) -> Solved | None:
        """The best plan where risk costs `price` seconds per unit; None if there is none.

        `fine` looks for patterns for smaller groups of blocks with similar risks, and picks with more care.
        """
        view, rooms = self.view, self.rooms
        if rooms.outside < 0:
            return None
        full = _everywhere(view, [store_all(view, index) for index in range(len(view.classes))])
        if fits(rooms, [block.cost for block in full]):
            everything = Price(view, price)
            return _solved(everything, full, self.limit, everything.total(full))
        task = _Task(self, Price(view, price), fine)
        best, bound = task.best()
        if best is None:
            least = self.planner.least(view)
            if least.simulation.peak_bytes > self.limit:
                return None
            best = list(least.columns)
        best = task.improved(best, bound)
        self.plans.append(best)
        return _solved(task.price, best, self.limit, bound)

    @cached_property
    def blocks(self) -> list[BlockSolver]:
        """What finds patterns, by class."""
        solver = self.planner.solver
        return [BlockSolver(self.view, index, self.scale, solver) for index in range(len(self.view.classes))]

    @cached_property
    def chains(self) -> list[list[Column]]:
        """Patterns to begin with, by class. With codecs they come in addition: what is exact has to be there."""
        plain = exact_view(self.view)
        chains = [chain(plain, index) for index in range(len(plain.classes))]
        if plain.classes == self.view.classes:
            return chains
        return [[*exact, *chain(self.view, index)] for index, exact in enumerate(chains)]

    @cached_property
    def greedy(self) -> list[Column] | None:
        """The exact greedy plan."""
        plain = exact_view(self.view)
        return solve_greedy(plain, self.rooms, [[c for c in known if not c.codes] for known in self.chains])


@dataclass(frozen=True)
class _Task:
    """One view under one limit at one price of risk."""

    site: Site
    price: Price
    fine: bool = False

    @property
    def _solver(self) -> str:
        return self.site.planner.solver

    @property
    def _again(self) -> bool:
        """Whether plans that fit are known from other prices: then the pools have what a first solve looks for."""
        return bool(self.site.plans)

    @property
    def _is_small(self) -> bool:
        view = self.price.view
        return sum(len(view.classes[index].units) for index in view.class_of) <= WHOLE_UNITS

    def best(self) -> tuple[list[Column] | None, float]:
        """The best plan found, if any, and a lower bound on what all plans cost.

        The solver's plan is taken only if the simulator finds it to fit; the greedy one, or one found at another price,
        stands in for it if need be.
        """
        try:
            found, bound = self._by_whole() if self._is_small else self._by_patterns()
        except SolverError:
            found, bound = None, 0.0
        plans = [plan for plan in (found, *self._incumbents()) if plan is not None and self._fits(plan)]
        return min(plans, key=self.price.total, default=None), bound

    def improved(self, columns: list[Column], bound: float) -> list[Column]:
        """The plan with its leftover room used, if there is anything to gain."""
        if self._again and not self._is_small:  # other prices are worth more of the time than this
            return columns
        enough = bound + ENOUGH_GAP * self.price.view.store.step_seconds
        return fill(self.site.rooms, self.price, columns, self.site.blocks, enough)

    def least(self) -> list[Column] | None:
        """The plan with the least peak as the solver finds it; the limit has to be 0."""
        try:
            if not self._is_small:
                return self._least_by_patterns()
            patterns = least_whole(self.price.view, self.site.rooms, self.site.scale, self._solver)
        except SolverError:
            return None
        return None if patterns is None else self._columns(patterns)

    def _incumbents(self) -> list[list[Column]]:
        greedy = self.site.greedy
        return [*([] if greedy is None else [greedy]), *self.site.plans]

    def _fits(self, columns: Sequence[Column]) -> bool:
        return fits(self.site.rooms, [block.cost for block in columns])

    def _columns(self, patterns: Sequence[Pattern]) -> list[Column]:
        pairs = zip(self.price.view.class_of, patterns, strict=True)
        return [column(self.price.view, index, pattern) for index, pattern in pairs]

    def _by_whole(self) -> tuple[list[Column] | None, float]:
        """The solution of the program as it stands.

        A solver takes a binary for whole within 1e-6, so that a plan may come out a few bytes over its limit; CBC may
        even find none where there is one. Then it is solved again with less room, each time 16 times as much less.
        """
        rooms, bound = self.site.rooms, 0.0
        for attempt in range(TRIES):
            found = solve_whole(self.price, rooms, self.site.scale, self._solver, 0.0)
            over = 1
            if found is not None:
                columns = self._columns(found[0])
                bound = bound if attempt else found[1]  # the first one is that of the whole room
                over = excess(self.site.rooms, [block.cost for block in columns])
                if over <= 0:
                    return columns, bound
            elif not any(map(self._fits, self._incumbents())):
                break
            rooms = lowered(self.site.rooms, over << (4 * attempt))
        return None, bound

    def _by_patterns(self) -> tuple[list[Column] | None, float]:
        view, scale = self.price.view, self.site.scale
        master = self._master(least=False)
        step = view.store.step_seconds / scale.second_unit
        relaxed = master.relax(step * RELAXATION_GAP, feasible=self._again)
        if relaxed is None:
            return None, 0.0
        if not self._again:
            master.refine(relaxed)
        self._remember(relaxed.used if self._again else master.pools)
        most = min(map(self.price.total, self._incumbents()), default=_most_seconds(view))
        window = max(most / scale.second_unit - relaxed.bound, 0.0) + step * RELAXATION_GAP
        rough = self._again and not self.fine and bool(self.price.price)
        return master.pick(relaxed, window, step * CHOICE_GAP, rough=rough), relaxed.bound * scale.second_unit

    def _least_by_patterns(self) -> list[Column] | None:
        master = self._master(least=True)
        relaxed = master.relax(0.01)
        return None if relaxed is None else master.pick_least(1.0)

    def _master(self, *, least: bool) -> Master:
        site, view = self.site, self.price.view
        master = Master(self.price, site.rooms, site.scale, self._solver, site.blocks, self._groups(), least)
        for index, cls in enumerate(view.classes):
            known = [column(view, index, pattern) for pattern in site.planner.known.get(cls.name, ())]
            places = [place for place, number in enumerate(view.class_of) if number == index]
            found = [plan[place] for plan in site.plans for place in places]
            master.add(index, [*site.chains[index], *known, *found])
        return master

    def _groups(self) -> Groups:
        """One group per class where risk is free."""
        most = (MANY_GROUPS if self.fine else FEW_GROUPS) if self.price.price else 1
        if most not in self.site.groups:
            self.site.groups[most] = grouped(self.price.view, most)
        return self.site.groups[most]

    def _remember(self, pools: Sequence[Sequence[Column]]) -> None:
        for cls, pool in zip(self.price.view.classes, pools, strict=True):
            known = self.site.planner.known.setdefault(cls.name, {})
            known.update(dict.fromkeys(candidate.pattern for candidate in pool))


def _recompute_all(view: View) -> list[Column]:
    return [column(view, index, recompute_all(cls)) for index, cls in enumerate(view.classes)]


def _everywhere(view: View, by_class: Sequence[Column]) -> list[Column]:
    return [by_class[index] for index in view.class_of]


def _most_seconds(view: View) -> float:
    """What recomputing all costs: a measure for the scale of seconds."""
    return Price(view).total(_everywhere(view, _recompute_all(view)))


def _simulated(view: View, columns: Sequence[Column]) -> Simulation:
    pairs = zip(view.class_of, columns, strict=True)
    return simulate(view, [named(view.classes[index], block.pattern) for index, block in pairs])


def _solved(price: Price, columns: Sequence[Column], limit: int, bound: float) -> Solved:
    simulation = _simulated(price.view, columns)
    if simulation.peak_bytes > limit:  # cannot happen: `fits` and the simulator say the same
        raise SolverError(f"a plan of {simulation.peak_bytes} bytes came out for a limit of {limit} bytes")
    risk = total_risk(price.view, columns)
    over = max(0.0, simulation.recompute_seconds + price.price * risk - bound)
    return Solved(tuple(columns), simulation, risk, bound, over / max(simulation.step_seconds, 1e-12))
