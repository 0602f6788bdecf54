r"""The integer program: which units to keep, so that a step is fastest and every point of the timeline is in its limit.

For each block b, with values v, ops o and stages p of its backward (0 runs first):

    minimise   sum_b ( sum_o t_o r[o,P] + sum_v n_v c_v )
    subject to, within each block,
      s_v + c_v <= 1                          a unit is stored, cast or recomputed (= 1 if nothing can rebuild it)
      d[v,p] + s_v + c_v >= 1                 from the first stage that has v as a slot, v is wanted or kept
      d[v,p] <= 1 - s_v - c_v                 what is kept is not wanted
      d[v,p] <= sum_{o reads v} r[o,p]        nothing is wanted before its time (earlier than v's first slot)
      d[v,p] <= r[o,p] <= sum_v d[v,p]        an op o has run by stage p if one of its outputs v was wanted by then
      r[o,p] <= r[o,p+1]
      r[o,p] <= d[u,p] + s_u + c_u            ... and each of its inputs u is there (u not free)
      a[v,p] >= r[o,p] - r[o,p-1]             v, made by o, is alive in the stage that makes it ...
      a[v,p] >= r[o,p] - s_v - c_v + m - 1    ... until the last stage that needs it
      k[v,p] >= s_v + m - 1                   a stored v is alive until the last stage that needs it (h: a cast one)
      w[v,p] >= c_v + f + m - 2               the widened copy of a cast v: from the first stage to the last
    where m = 1 if v has a slot in stage p or later, else m = r[o',P] - r[o',p-1] for each reader o' of v,
          f = 1 if v has a slot in stage p or earlier, else f = r[o',p] for each reader o',
    and across the blocks, with K_b = sum_v ( B_v s_v + N_v c_v )
          and H[b,p] = sum_v ( B_v (k[v,p] + a[v,p] + w[v,p]) + N_v h[v,p] ) + work[b,p]:
      forward:b     K_0 + ... + K_b            <= L - fixed - work
      head          K_0 + ... + K_last         <= L - fixed - head
      backward:b:p  K_0 + ... + K_{b-1} + H[b,p] <= L - fixed - gradients so far

    symbol      variable                     meaning
    s_v, c_v    BlockProgram.store, .cast    binary: v is stored, is cast
    r[o,p]      _Builder.ran[o][p]           o has run again by the end of stage p (P: the last stage)
    d[v,p]      _Builder.wanted[v][p]        v has been wanted by the end of stage p
    a, k, h, w  made by _Builder._any        alive in stage p: rebuilt, stored, cast, widened
    K_b, H[b,p] BlockProgram.kept, .stages   bytes kept from forward on, bytes held in a stage
    t_o, n_v    OpView.seconds, narrow_seconds (times micro-batches, and the recompute scale for t_o)
    B_v, N_v    value_bytes, narrow_bytes
    L           the limit on peak memory; fixed, work, head, gradients: `View` and `Rooms`

Only s and c need to be binary: all else follows from them. For few blocks this is solved as it stands (`solve_whole`).
For many, equal blocks make the tree explode, so `ilp_master` solves it over whole-block patterns (Dantzig and Wolfe,
"Decomposition principle for linear programs", 1960): blocks meet only in K_b and H[b,p], and `BlockSolver` finds the
pattern that a block should add at given prices of bytes, or within given bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from hilore_plan.planner.ilp_block import BlockProgram, add_block
from hilore_plan.planner.ilp_solver import Expression, Program, Scale, bound, run
from hilore_plan.planner.patterns import Pattern
from hilore_plan.planner.rooms import Rooms
from hilore_plan.planner.timeline import View

UNLIMITED = 1e7  # in the solver's unit, where no limit is above 2^20 and no block needs ten times that


class BlockSolver:
    """Finds the best pattern for one block, again and again under other prices or limits."""

    def __init__(self, view: View, index: int, scale: Scale, solver: str) -> None:
        self.solver, self.scale = solver, scale
        self.problem = pulp.LpProblem(f"class{index}", pulp.LpMinimize)
        self.block = add_block(self.problem, view, index, scale, "")
        self.limits = [expression <= UNLIMITED for expression in (self.block.kept, *self.block.stages)]
        self.constants = [limit.constant for limit in self.limits]
        for limit in self.limits:
            self.problem.addConstraint(limit)

    def priced(self, seconds_weight: float, kept_price: float, stage_prices: Sequence[float]) -> Pattern:
        """The pattern with the least weighted seconds plus price of bytes (solver units)."""
        prices = zip((kept_price, *stage_prices), (self.block.kept, *self.block.stages), strict=True)
        costs = [seconds_weight * self.block.seconds, *(price * size for price, size in prices if price)]
        self._limit([UNLIMITED] * len(self.limits))
        return self._solve(pulp.lpSum(costs)) or ()

    def within(self, kept_bytes: int, stage_bytes: int) -> Pattern | None:
        """The fastest pattern that keeps at most `kept_bytes` and holds at most `stage_bytes` in any stage."""
        stages = [self.scale.room(stage_bytes)] * (len(self.limits) - 1)
        self._limit([self.scale.room(kept_bytes), *stages])
        return self._solve(self.block.seconds)

    def _limit(self, rooms: Sequence[float]) -> None:
        for limit, constant, room in zip(self.limits, self.constants, rooms, strict=True):
            limit.constant = constant + UNLIMITED - min(room, UNLIMITED)

    def _solve(self, objective: Expression) -> Pattern | None:
        self.problem.setObjective(objective)
        return self.block.pattern() if run(self.problem, self.solver) else None


def solve_whole(view: View, rooms: Rooms, scale: Scale, solver: str, gap: float) -> tuple[list[Pattern], float] | None:
    """The whole program at once: one pattern per block, and a lower bound on the seconds; None if there is no plan.

    `gap` is absolute, in seconds.
    """
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    blocks = _add_blocks(problem, view, scale)
    problem.setObjective(pulp.lpSum(block.seconds for block in blocks))
    _add_rooms(problem, blocks, rooms, scale, 0)
    allowed = gap / scale.second_unit
    if not run(problem, solver, gap=allowed):
        return None
    return [block.pattern() for block in blocks], bound(problem, allowed) * scale.second_unit


def least_whole(view: View, rooms: Rooms, scale: Scale, solver: str) -> list[Pattern] | None:
    """The patterns with the least peak; None if no plan exists at all. Points without blocks do not count."""
    problem = pulp.LpProblem("least", pulp.LpMinimize)
    blocks = _add_blocks(problem, view, scale)
    over = problem.add_variable("over")
    problem.setObjective(over + pulp.lpSum([]))
    _add_rooms(problem, blocks, rooms, scale, over)
    return [block.pattern() for block in blocks] if run(problem, solver) else None


def _add_blocks(problem: Program, view: View, scale: Scale) -> list[BlockProgram]:
    return [add_block(problem, view, index, scale, f"b{place}") for place, index in enumerate(view.class_of)]


def _add_rooms(problem: Program, blocks: Sequence[BlockProgram], rooms: Rooms, scale: Scale, over: Expression) -> None:
    """The rows across the blocks, which may exceed their room by `over`. `kept` is a variable to keep rows short."""
    before: Expression = pulp.lpSum([])
    for place, block in enumerate(blocks):
        for held in block.stages:
            problem.addConstraint(before + held - over <= scale.room(rooms.backward[place]))
        kept = problem.add_variable(f"kept{place}", 0)
        problem.addConstraint(kept == before + block.kept)
        problem.addConstraint(kept - over <= scale.room(rooms.forward[place]))
        before = kept
    problem.addConstraint(before - over <= scale.room(rooms.head))
