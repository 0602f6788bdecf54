r"""The integer program: which units to keep, so that a step is fastest and every point of the timeline is in its limit.

For each block b, with values v, ops o, stages p of its backward (0 runs first), forms f of a value beside its own (the
cast one, and one per codec), and x_v = s_v + sum_f c_vf:

    minimise   sum_b ( sum_o t_o r[o,P] + sum_vf (n_vf + mu rho_bvf) c_vf )
    subject to, within each block,
      x_v <= 1                                a unit is stored, kept in a form, or recomputed (= 1 if it cannot be)
      d[v,p] + x_v >= 1                       from the first stage that has v as a slot, v is wanted or kept
      d[v,p] <= 1 - x_v                       what is kept is not wanted
      d[v,p] <= d[v,p+1]
      d[v,p] <= sum_{o reads v} r[o,p]        nothing is wanted before its time (earlier than v's first slot)
      d[v,p] <= r[o,p] <= sum_v d[v,p]        an op o has run by stage p if one of its outputs v was wanted by then
      r[o,p] <= r[o,p+1]
      r[o,p] <= d[u,p] + x_u                  ... and each of its inputs u is there (u not free)
      a[v,p,t] >= r[o,p-1] - x_v + m - 1      v, made by o in an earlier stage, is alive until the last that needs it
      u[v,p,o] = r[o,p] - r[o,p-1]            made in this stage, it is alive after o in any case ...
      u[v,p,q] >= u[v,p,o] - x_v + m' - 1     ... and after each later op q, and at the end, if it is still needed
      k[v,p,t] >= s_v + m - 1                 a stored v is alive until the last stage that needs it (h: one in a form)
      w[v,l,p,t] >= sum_f c_vf + f + m - 2    the copy of such a v that stage l or an earlier one has decoded
      sum_{codec f} c_vf <= x_u               where anything is compressed, each input u of the block is kept
      i_v >= sum_{codec f} c_vf               what is compressed is inexact ...
      i_v >= i_u + d[v,P] - 1                 ... and so is v, made by o that reads u, if v is rebuilt
      i_u + x_v <= 1                          u is exact if o keeps its output v, a slot, and wants u exact
    where m = 1 if v has a slot in stage p or later, else m = r[o',P] - r[o',t-1] for each reader o' of v,
          f = 1 if v has a slot in stage l or earlier, else f = r[o',l] for each reader o',
          m' = m, but with r[o',P] - r[o',p] for readers o' before q: if they run in this stage, they have run,
    and across the blocks, with K_b = sum_v ( B_v s_v + sum_f N_vf c_vf )
          T[b,l,p,t] = sum_v ( B_v (k[v,p,t] + a[v,p,t] + w[v,l,p,t]) + sum_f N_vf h[v,f,p,t] ),
          F_b >= P_i + sum_{v gone by i} B_v s_v + sum_{v saved by i} sum_f N_vf c_vf    for each moment i of forward,
          H[b,p] >= T[b,p-1,p,p] + early[b,p]                                            before the first request,
          H[b,p] >= T[b,p,p,p] + sum_v B_v u[v,p,q] + O_q (r[q,p] - r[q,p-1]) + ask[b,p] for each op q of the program,
          H[b,p] >= T[b,p,p,p+1] + sum_v B_v u[v,p,end] + late[b,p]                      when it is over, and
          early[b,p] >= W_v (1 - sum_{u asked for up to v} (1 - s_u))                    for each slot v of the stage,
          ask[b,p] >= A_v (1 - x_v - sum_{u asked for before v} (1 - x_u))
          late[b,p] >= max_{u asked for from v on} W_u (1 - s_v):
      forward:b     K_0 + ... + K_{b-1} + F_b    <= L - fixed
      head          K_0 + ... + K_last           <= L - fixed - head
      backward:b:p  K_0 + ... + K_{b-1} + H[b,p] <= L - fixed - gradients so far

    symbol      variable                     meaning
    s_v, c_vf   BlockProgram.store, .coded   binary: v is stored, is kept in form f
    r[o,p]      Variables.ran[o][p]          o has run again by the end of stage p (P: the last stage)
    d[v,p]      Variables.wanted[v][p]       v has been wanted by the end of stage p
    i_v         _Builder.inexact[v]          v is inexact in backward; only where something has to be exact
    a, k, h, w  made by StageProgram         alive in stage p: carried on, stored, in a form, decoded; t is p while the
                                             program still has to read them, and p+1 when it is over
    u[v,p,q]    _Made.after                  alive in stage p after op q
    early, late Common                       bytes beyond the stage's values: before any value that is not there as it
                                             is has been asked for, and from then on
    ask         StageProgram                 the same when the first missing value is asked for
    A_v, W_v    Request                      the same when v is first asked for, and from then to the next request
    P_i         Moment.peak_bytes            what forward holds if nothing is kept, with its input
    K_b, F_b,   BlockProgram.kept, .held     bytes kept from forward on, bytes held in forward, and in a stage
    H[b,p]
    t_o, n_vf   OpView, Form .seconds        (times micro-batches, and the recompute scale for t_o)
    B_v, N_vf   value_bytes, Form.bytes
    O_q         OpView.working_bytes
    mu, rho     Price.price, View.rho        seconds per squared error, and the squared error of v in form f
    L           the limit on peak memory; fixed, work, head, gradients: `View` and `Rooms`

Where a class has codecs, r, d, a, u, w, ask and H >= ... are there twice. The second time x_v leaves the codecs out:
that is the way back of a micro-batch that turns out riskier, on which what is compressed is rebuilt exactly. It costs
no seconds, for it is rare, but H has room for it; and k and h count what either way reads.

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
from hilore_plan.planner.risk import Price, Rho
from hilore_plan.planner.rooms import Rooms
from hilore_plan.planner.timeline import View

UNLIMITED = 1e7  # in the solver's unit, where no limit is above 2^20 and no block needs ten times that


class BlockSolver:
    """Finds the best pattern for one block, again and again under other prices or limits."""

    def __init__(self, view: View, index: int, scale: Scale, solver: str) -> None:
        self.solver, self.scale = solver, scale
        self.problem = pulp.LpProblem(f"class{index}", pulp.LpMinimize)
        self.block = add_block(self.problem, view, index, scale, "")
        self.limits = [expression <= UNLIMITED for expression in (self.block.kept, *self.block.held)]
        self.constants = [limit.constant for limit in self.limits]
        for limit in self.limits:
            self.problem.addConstraint(limit)

    def priced(
        self,
        seconds_weight: float,
        kept_price: float,
        held_prices: Sequence[float],
        risk_price: float = 0.0,
        rho: Rho | None = None,
    ) -> Pattern:
        """The pattern with the least weighted seconds plus price of bytes (solver units).

        A second of risk at `risk_price` (seconds per unit) counts like any other.
        """
        prices = zip((kept_price, *held_prices), (self.block.kept, *self.block.held), strict=True)
        costs = [seconds_weight * self.block.seconds, *(price * size for price, size in prices if price)]
        costs += self._risk(seconds_weight * risk_price, rho)
        self._limit([UNLIMITED] * len(self.limits))
        return self._solve(pulp.lpSum(costs)) or ()

    def within(
        self, kept_bytes: int, forward_bytes: int, stage_bytes: int, risk_price: float = 0.0, rho: Rho | None = None
    ) -> Pattern | None:
        """The fastest pattern that keeps `kept_bytes` at the most, and holds no more in forward and in any stage."""
        stages = [stage_bytes] * (len(self.limits) - 2)
        self._limit([self.scale.room(room) for room in (kept_bytes, forward_bytes, *stages)])
        return self._solve(pulp.lpSum([self.block.seconds, *self._risk(risk_price, rho)]))

    def _risk(self, price: float, rho: Rho | None) -> list[Expression]:
        if not price or rho is None:
            return []
        return [price / self.scale.second_unit * self.block.risk(rho)]

    def _limit(self, rooms: Sequence[float]) -> None:
        for limit, constant, room in zip(self.limits, self.constants, rooms, strict=True):
            limit.constant = constant + UNLIMITED - min(room, UNLIMITED)

    def _solve(self, objective: Expression) -> Pattern | None:
        self.problem.setObjective(objective)
        return self.block.pattern() if run(self.problem, self.solver) else None


def solve_whole(
    price: Price, rooms: Rooms, scale: Scale, solver: str, gap: float
) -> tuple[list[Pattern], float] | None:
    """The whole program at once: one pattern per block, and a lower bound on the seconds; None if there is no plan.

    Seconds include the price of risk; `gap` is absolute, in seconds.
    """
    view, each = price.view, price.price / scale.second_unit
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    blocks = _add_blocks(problem, view, scale)
    risks = [each * block.risk(rho) for block, rho in zip(blocks, view.rho, strict=True) if each]
    problem.setObjective(pulp.lpSum([*(block.seconds for block in blocks), *risks]))
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
        for held, room in zip(block.held, rooms.held(place), strict=False):
            problem.addConstraint(before + held - over <= scale.room(room))
        kept = problem.add_variable(f"kept{place}", 0)
        problem.addConstraint(kept == before + block.kept)
        before = kept
    problem.addConstraint(before - over <= scale.room(rooms.head))
