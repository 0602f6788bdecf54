"""Plans to compare a plan with: other ways to choose, for the same profile and budget.

| name | what it does |
| --- | --- |
| `exact-plan` | the same planner without risk: nothing is compressed |
| `greedy` | unit by unit, the best saver per byte first, while memory and risk allow it; exposure is ignored |
| `compress-int8` | everything that int8 takes is kept in int8, the rest as it is; nothing is recomputed for speed |
| `preprint` | whole blocks, as in "HiLoRe: What to Store, Compress, or Recompute for Efficient GRPO Training" |

The preprint chooses per block between storing it, recomputing it, and recomputing it around one tensor that is kept by
a bare cast to fp8 (here: the largest that `fp8_e4m3_raw` takes). The errors of blocks are added up as they are, not by
their squares, times the exposure, and a dynamic program finds the fastest choice within memory and risk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hilore_plan.errors import InfeasibleBudgetError, UsageError
from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.buckets import Bucket
from hilore_plan.planner.choose import choose
from hilore_plan.planner.entries import entry
from hilore_plan.planner.greedy import Worth, chain, solve_greedy
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.patterns import Column, Pattern, column, named, recompute_all, store_all
from hilore_plan.planner.plan import solve_plan
from hilore_plan.planner.risk import Price, total_risk
from hilore_plan.planner.rooms import Rooms, rooms_at
from hilore_plan.planner.simulate import simulate
from hilore_plan.planner.solve import Solved
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.planner.without_gradients import distinguished
from hilore_plan.schema.plan import Action, Entry, Plan, compressed
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import GradientState

INT8 = compressed("int8")
RAW = compressed("fp8_e4m3_raw")
BANDS = 192
EVERYTHING = Bucket(None)
HALVINGS = 40
HIGHEST_PRICE = 1e9


def baseline(name: str, plan: Plan, profile: Profile | None) -> Plan:
    """The baseline of this name for the largest micro-batches of a plan.

    Raises:
        UsageError: there is no profile, or not that of the plan.
        InfeasibleBudgetError: it finds no plan within the budget.
    """
    if profile is None:
        raise UsageError(f"mode {name!r} is made from a profile", "give the profile that the plan was made from")
    if profile.block_names != plan.block_names or profile.points[-1].tokens != plan.workload.tokens:
        raise UsageError("the profile is not the one that the plan was made from", "give that one")
    if name == "exact-plan":
        budget, limit = plan.budget.asked, plan.budget.limit_bytes
        return solve_plan(profile, budget=budget, risk="0", token_buckets=1, solver=plan.solver.name, limit_bytes=limit)
    kinds = distinguished(profile, plan.budget.limit_bytes)
    return plan.model_copy(update={"entries": tuple(_entry(name, plan, profile, gradients) for gradients in kinds)})


def _entry(name: str, plan: Plan, profile: Profile, gradients: GradientState) -> Entry:
    view = view_at(profile, plan.workload.tokens, gradients)
    columns = _CHOOSERS[name](view, plan)
    if columns is None:
        raise InfeasibleBudgetError(f"{name} finds no plan within {plan.budget.asked}", "give a larger --budget", 0)
    return entry(view, _solved(view, columns), EVERYTHING, 0, gradients)


def _solved(view: View, columns: Sequence[Column]) -> Solved:
    pairs = zip(view.class_of, columns, strict=True)
    simulation = simulate(view, [named(view.classes[index], block.pattern) for index, block in pairs])
    return Solved(tuple(columns), simulation, total_risk(view, columns), 0.0, 0.0)


def _greedy(view: View, plan: Plan) -> list[Column] | None:
    most = _limit(plan) ** 2

    def allowed(columns: Sequence[Column]) -> bool:
        return total_risk(view, columns) <= most

    chains = [chain(view, index, _worth(view, index, plan)) for index in range(len(view.classes))]
    return solve_greedy(view, _rooms(view, plan), chains, allowed=allowed)


def _worth(view: View, index: int, plan: Plan) -> Worth:
    """Seconds saved per part of the budgets used up: of memory, and of risk at the mean of the class's blocks."""
    rhos = [rho for number, rho in zip(view.class_of, view.rho, strict=True) if number == index]
    most = _limit(plan) ** 2 / len(view.blocks)

    def risk(column: Column) -> float:
        return sum(rho.get(code, 0.0) for code in column.codes for rho in rhos) / len(rhos)

    def worth(before: Column, after: Column) -> float:
        share = (after.cost.kept_bytes - before.cost.kept_bytes) * len(view.blocks) / plan.budget.limit_bytes
        share += (risk(after) - risk(before)) / most if most else 0.0
        return (before.cost.seconds - after.cost.seconds) / max(share, 1e-12)

    return worth


def _compress_int8(view: View, plan: Plan) -> list[Column] | None:
    del plan
    by_class = [column(view, index, _int8_pattern(view, index)) for index in range(len(view.classes))]
    return [by_class[index] for index in view.class_of]


def _int8_pattern(view: View, index: int) -> Pattern:
    """Int8 wherever it is allowed, unit by unit in the order of execution; inputs and the rest are stored."""
    cls = view.classes[index]
    pattern: list[Action] = ["store"] * len(cls.units)
    for place, unit in enumerate(cls.units):
        if cls.form(unit, INT8) is None:
            continue
        pattern[place] = INT8
        try:
            column(view, index, tuple(pattern))
        except UnrecoverableError:
            pattern[place] = "store"
    return tuple(pattern)


def _preprint(view: View, plan: Plan) -> list[Column] | None:
    """The least price of error at which the errors of all blocks, added up, stay within the limit."""
    pools = [_whole_blocks(view, index) for index in range(len(view.classes))]
    low, high = 0.0, HIGHEST_PRICE
    best = _at_price(view, plan, pools, high)
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5 if low else high / 1e3
        found = _at_price(view, plan, pools, middle)
        if found is not None and _added_errors(view, found) <= _limit(plan):
            best, high = found, middle
        else:
            low = middle
    return best


def _at_price(view: View, plan: Plan, pools: Sequence[Sequence[Column]], price: float) -> list[Column] | None:
    linear = replace(view, rho=tuple({key: math.sqrt(risk) for key, risk in rho.items()} for rho in view.rho))
    return choose(_rooms(view, plan), Price(linear, price), [pools[index] for index in view.class_of], BANDS)


def _whole_blocks(view: View, index: int) -> list[Column]:
    cls = view.classes[index]
    pools = [column(view, index, recompute_all(cls)), store_all(view, index)]
    largest = _largest_raw(cls)
    if largest is not None:
        base = recompute_all(cls)
        pattern = tuple(RAW if unit == largest else action for unit, action in zip(cls.units, base, strict=True))
        pools.append(column(view, index, pattern))
    return pools


def _largest_raw(cls: ClassView) -> int | None:
    taken = [unit for unit in cls.units if cls.form(unit, RAW) is not None]
    return max(taken, key=lambda unit: (cls.value_bytes[unit], -unit), default=None)


def _added_errors(view: View, columns: Sequence[Column]) -> float:
    price = Price(view)
    return math.fsum(math.sqrt(price.risk(place, column)) for place, column in enumerate(columns))


def _limit(plan: Plan) -> float:
    return plan.risk.limit if plan.risk is not None else 0.0


def _rooms(view: View, plan: Plan) -> Rooms:
    return rooms_at(view, plan.budget.limit_bytes)


_CHOOSERS: dict[str, Callable[[View, Plan], list[Column] | None]] = {
    "greedy": _greedy,
    "compress-int8": _compress_int8,
    "preprint": _preprint,
}
