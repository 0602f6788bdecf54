"""The integer program over whole-block patterns: see the head of `ilp`.

    minimise   sum_b sum_j T_j x[b,j]           T_j, K_j, H_jp: seconds and bytes of pattern j, from the simulator
    subject to sum_j x[b,j] = 1                 dual sigma_b
               S_b = S_{b-1} + sum_j K_j x[b,j] dual gamma_b: the price of a byte that b keeps
               S_{b-1} + sum_j H_jp x[b,j] <= room of b in p    dual -beta_bp: the price of a byte that b holds in p,
               S_last <= head room                              which is its forward or a stage of its backward

A pattern helps block b if its reduced cost T + gamma_b K + sum_p beta_bp H_p - sigma_b is negative. Where the best
patterns of all blocks gain little, value of the relaxation plus that little is a lower bound for every plan (Lagrange).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pulp

from hilore_plan.planner.choose import choose
from hilore_plan.planner.groups import Groups
from hilore_plan.planner.ilp import BlockSolver
from hilore_plan.planner.ilp_solver import Constraint, Expression, Scale, run
from hilore_plan.planner.patterns import Column, column, pareto
from hilore_plan.planner.risk import Price, Rho
from hilore_plan.planner.rooms import Rooms, fits

ROUNDS = 60
FEW_STEPS, MANY_STEPS = 8, 4  # the fewer blocks there are to mix, the more is lost by mixing only a few patterns
FEW_BLOCKS = 16
BANDS = (24, 192)
SOME = 1e-6  # a share below this is noise of the linear solver
NODES = 20  # the root and its heuristics find nearly all; equal blocks make the tree hard to finish
TINY = 1e-7  # prices below this are noise of the linear solver


@dataclass(frozen=True)
class Prices:
    """The duals of one block: what seconds, kept bytes and held bytes cost, and what its pattern costs at present."""

    seconds: float
    kept: float
    held: tuple[float, ...]
    paid: float

    def reduced(self, candidate: Column, seconds: float, scale: Scale) -> float:
        """How much a pattern that costs `seconds` would add to (below zero: take off) the relaxation's value."""
        sizes = zip(self.held, candidate.cost.held_bytes, strict=True)
        held = sum(price * scale.bytes(size) for price, size in sizes)
        kept = self.kept * scale.bytes(candidate.cost.kept_bytes)
        return self.seconds * seconds / scale.second_unit + kept + held - self.paid


@dataclass(frozen=True)
class Relaxed:
    """The relaxation: a lower bound (solver units), the prices for each block, the patterns that each class uses."""

    bound: float
    prices: tuple[Prices, ...]
    used: tuple[tuple[Column, ...], ...]


class Master:
    """Grows the pools of patterns and picks from them, for one view and limit.

    `pools` has the columns of each class. With `least` the peak is minimised and the seconds do not count; otherwise
    the seconds are minimised within the rooms.
    """

    def __init__(
        self,
        price: Price,
        rooms: Rooms,
        scale: Scale,
        solver: str,
        blocks: Sequence[BlockSolver],
        groups: Groups,
        least: bool = False,
    ) -> None:
        self.price, self.view, self.rooms, self.scale, self.solver = price, price.view, rooms, scale, solver
        self.blocks, self.least = blocks, least
        self.groups = groups
        self.rhos: list[list[Rho]] = [[] for _ in self.view.classes]
        for index, rho in zip(groups.class_of, groups.least, strict=True):
            self.rhos[index].append(rho)
        self.pools: list[list[Column]] = [[] for _ in self.view.classes]

    def add(self, index: int, columns: Sequence[Column]) -> None:
        """Add patterns to the pool of a class; what is beaten in every respect is dropped."""
        self.pools[index] = pareto([*self.pools[index], *columns], self.rhos[index])

    def relax(self, tolerance: float, *, feasible: bool = False) -> Relaxed | None:
        """Price patterns in until the relaxation is within `tolerance` of its bound; None if it has no solution.

        The pools then hold what a good plan needs; with `feasible` they hold some plan already.
        """
        if self.least:
            return self._converge(tolerance, seconds=0.0, peak=True)
        if not feasible and self._converge(TINY, seconds=0.0, peak=False) is None:
            return None
        return self._converge(tolerance, seconds=1.0, peak=False)

    def pick(self, relaxed: Relaxed, window: float, gap: float, *, rough: bool = False) -> list[Column] | None:
        """The best plan made of patterns whose reduced cost is inside `window`; None if there is none.

        No plan better than the relaxation's bound plus `window` needs any other pattern. Of many blocks the integer
        program soon finds a mix within `gap`; over few, equal ones its tree is long, and dynamic programming short.
        With `rough`, the first choice of the latter has to do.
        """
        if rough:
            return choose(self.rooms, self.price, self._pools(relaxed, window), BANDS[0])
        if len(self.view.blocks) <= FEW_BLOCKS:
            return self._pick_few(relaxed, window)
        pools = self._pools(relaxed, window)
        program = _Program(self, pools, 1.0, over=False, whole=True)
        found = program.chosen() if run(program.problem, self.solver, gap=gap, nodes=NODES) else None
        if found is None or fits(self.rooms, [block.cost for block in found]):
            return found
        # a few bytes over, by the tolerance within which the solver takes a binary for whole
        return choose(self.rooms, self.price, pools, BANDS[0])

    def _pick_few(self, relaxed: Relaxed, window: float) -> list[Column] | None:
        """A rough choice first makes the window, and so the work of the fine one, small."""
        chosen = None
        for bands in BANDS:
            chosen = choose(self.rooms, self.price, self._pools(relaxed, window), bands) or chosen
            if chosen is not None:
                window = min(window, self.price.total(chosen) / self.scale.second_unit - relaxed.bound + TINY)
        return chosen

    def pick_least(self, gap: float) -> list[Column] | None:
        """The plan with the least peak within `gap` (solver units), from all patterns."""
        pools = [self.pools[index] for index in self.view.class_of]
        program = _Program(self, pools, 0.0, over=True, whole=True)
        return program.chosen() if run(program.problem, self.solver, gap=gap, nodes=NODES) else None

    def _places(self) -> range:
        return range(len(self.view.blocks))

    def refine(self, relaxed: Relaxed) -> None:
        """Add patterns between those that the relaxation mixes: whole blocks cannot be mixed, but can be in between."""
        steps = FEW_STEPS if len(self.view.blocks) <= FEW_BLOCKS else MANY_STEPS
        for index, used in enumerate(relaxed.used):
            low, *_, high = sorted(candidate.cost.kept_bytes for candidate in (*used, *used))
            forward, *stages = map(max, _held_bytes(used))
            for step in range(1, steps):
                room = low + (high - low) * step // steps
                pattern = self.blocks[index].within(room, forward, max(stages), self.price.price, self.rhos[index][0])
                if pattern is not None:
                    self.add(index, [column(self.view, index, pattern)])

    def _pools(self, relaxed: Relaxed, window: float) -> list[list[Column]]:
        return [self._near(place, prices, window) for place, prices in enumerate(relaxed.prices)]

    def _near(self, place: int, prices: Prices, window: float) -> list[Column]:
        pool = self.pools[self.view.class_of[place]]
        return [candidate for candidate in pool if self._reduced(place, prices, candidate) <= window]

    def _reduced(self, place: int, prices: Prices, candidate: Column) -> float:
        return prices.reduced(candidate, self.price.seconds(place, candidate), self.scale)

    def _converge(self, tolerance: float, seconds: float, peak: bool) -> Relaxed | None:
        """Column generation. Without `seconds` and `peak` it looks for any solution: how far limits are exceeded."""
        searching = not seconds and not peak
        lowest = -float("inf")
        for _ in range(ROUNDS):
            pools = [self.pools[index] for index in self.view.class_of]
            program = _Program(self, pools, seconds, over=searching or peak, floor=searching)
            run(program.problem, self.solver, relaxed=True)
            value, prices = float(program.problem.objective.value()), program.prices()
            if searching and value <= TINY:
                return Relaxed(0.0, prices, program.used())
            gain, grew = self._grow(prices)
            lowest = max(lowest, value + gain)
            if searching and lowest > TINY:
                return None
            if value - lowest <= tolerance or not grew:
                break
        return None if searching else Relaxed(lowest, prices, program.used())

    def _grow(self, prices: Sequence[Prices]) -> tuple[float, bool]:
        """Add each block's best pattern at its prices; gives the sum of their reduced costs, and if any was new.

        Blocks of a group are priced with its least risks, so that the sum bounds what their own best patterns gain.
        """
        best: dict[tuple[int, float, tuple[float, ...]], Column] = {}
        gain, grew = 0.0, False
        for place, index in enumerate(self.view.class_of):
            block, group = prices[place], self.groups.of[place]
            rho = self.groups.least[group]
            key = group, block.kept, block.held
            if key not in best:
                pattern = self.blocks[index].priced(block.seconds, block.kept, block.held, self.price.price, rho)
                best[key] = column(self.view, index, pattern)
                grew |= self._added(index, best[key])
            risk = self.price.price * sum(rho[code] for code in best[key].codes)
            gain += min(0.0, block.reduced(best[key], best[key].cost.seconds + risk, self.scale))
        return gain, grew

    def _added(self, index: int, candidate: Column) -> bool:
        """Add one pattern; whether the pool has it now and did not before."""
        if any(known.pattern == candidate.pattern for known in self.pools[index]):
            return False
        self.add(index, [candidate])
        return any(known is candidate for known in self.pools[index])


class _Program:
    """The program over given columns per block, relaxed or whole, written for PuLP."""

    def __init__(
        self,
        master: Master,
        columns: Sequence[Sequence[Column]],
        seconds: float,
        *,
        over: bool,
        floor: bool = False,
        whole: bool = False,
    ) -> None:
        self.master, self.columns, self.seconds = master, columns, seconds
        self.problem = pulp.LpProblem("master", pulp.LpMinimize)
        category = pulp.LpBinary if whole else pulp.LpContinuous
        self.shares = [
            [
                self.problem.add_variable(f"x{place}_{number}", 0, 1 if whole else None, category)
                for number in range(len(block))
            ]
            for place, block in enumerate(columns)
        ]
        self.over = self.problem.add_variable("over", 0 if floor else None) if over else 0
        self.problem.setObjective(self._objective())
        self.one: list[Expression] = []
        self.kept: list[Expression] = []
        self.held: list[list[Expression]] = []
        self._rows()

    def chosen(self) -> list[Column]:
        """The columns that the solution picks, one per block."""
        return [
            block[max(range(len(block)), key=lambda number: shares[number].value())]
            for block, shares in zip(self.columns, self.shares, strict=True)
        ]

    def used(self) -> tuple[tuple[Column, ...], ...]:
        """The columns that the relaxation mixes, by class."""
        used: list[dict[Column, None]] = [{} for _ in self.master.view.classes]
        for index, block, shares in zip(self.master.view.class_of, self.columns, self.shares, strict=True):
            pairs = zip(block, shares, strict=True)
            used[index].update(dict.fromkeys(candidate for candidate, share in pairs if share.value() > SOME))
        return tuple(tuple(columns) for columns in used)

    def prices(self) -> tuple[Prices, ...]:
        """The duals of each block."""
        return tuple(
            Prices(self.seconds, _price(kept.pi), tuple(_price(-row.pi) for row in held), float(one.pi))
            for one, kept, held in zip(self.one, self.kept, self.held, strict=True)
        )

    def _objective(self) -> Expression:
        unit = self.master.scale.second_unit
        pairs = [
            (share, self.seconds * self.master.price.seconds(place, candidate) / unit)
            for place, (block, shares) in enumerate(zip(self.columns, self.shares, strict=True))
            for candidate, share in zip(block, shares, strict=True)
        ]
        return pulp.LpAffineExpression(pairs) + self.over

    def _rows(self) -> None:
        rooms, scale = self.master.rooms, self.master.scale
        before: Expression = pulp.lpSum([])
        for place, (block, shares) in enumerate(zip(self.columns, self.shares, strict=True)):
            kept = self.problem.add_variable(f"kept{place}", None)
            self.one.append(self._row(pulp.lpSum(shares) == 1))
            sizes = _weighted(shares, [scale.bytes(candidate.cost.kept_bytes) for candidate in block])
            self.kept.append(self._row(kept - before - sizes == 0))
            pairs = zip(_held_bytes(block), rooms.held(place), strict=False)
            held = [(before + _weighted(shares, list(map(scale.bytes, sizes))), room) for sizes, room in pairs]
            self.held.append([self._row(held_bytes - self.over <= scale.room(room)) for held_bytes, room in held])
            before = kept
        self._row(before - self.over <= scale.room(rooms.head))

    def _row(self, constraint: Constraint) -> Constraint:
        self.problem.addConstraint(constraint)
        return constraint


def _held_bytes(columns: Sequence[Column]) -> Iterator[tuple[int, ...]]:
    """What each of some columns holds: in forward, then in each stage."""
    return zip(*(candidate.cost.held_bytes for candidate in columns), strict=True)


def _weighted(shares: Sequence[Expression], weights: Sequence[float]) -> Expression:
    return pulp.LpAffineExpression(list(zip(shares, weights, strict=True)))


def _price(dual: float) -> float:
    """A dual without the noise in its last digits, so that equal prices are seen to be equal."""
    return float(f"{dual:.9g}") if dual > TINY else 0.0
