"""The integer program itself against trying every pattern: what comes out of it before anything checks or repairs it.

Prices and limits are dense. At a price, the program's value has to be that of the best pattern; within limits at which
a pattern just fits, or just does not, it has to find the fastest one that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import le

import pulp
import pytest
from planner.brute import every_column
from planner.hand_made import VIEWS, twice

from hilore_plan.planner.groups import grouped
from hilore_plan.planner.ilp import BlockSolver, solve_whole
from hilore_plan.planner.ilp_block import BlockProgram, add_block
from hilore_plan.planner.ilp_master import Master
from hilore_plan.planner.ilp_solver import run, scale_for
from hilore_plan.planner.patterns import Column, Pattern, column, pareto
from hilore_plan.planner.risk import Price
from hilore_plan.planner.rooms import rooms_at
from hilore_plan.planner.simulate import assemble
from hilore_plan.planner.solve import Planner
from hilore_plan.planner.timeline import View

UNIT = scale_for(1, 1000)  # bytes and seconds as they are
BYTE_PRICES = [0.015 * 2.0**step for step in range(8)]  # from where all is stored to where nothing is
RISK_PRICES = [0.0, 0.15]

each_view = pytest.mark.parametrize("name", VIEWS)


def directions(stages: int) -> Iterator[tuple[float, list[float]]]:
    """Which bytes have a price: those kept, those held in forward or in one stage, or all."""
    yield 1.0, [0.0] * (stages + 1)
    yield 0.25, [1.0] * (stages + 1)
    for priced in range(stages + 1) if stages > 1 else [0]:
        yield 0.125, [float(place == priced) for place in range(stages + 1)]


def cost(view: View, found: Column, kept: float, held: list[float], risk: float) -> float:
    """What a pattern costs in the first block at prices of bytes and of risk."""
    most = sum(price * size for price, size in zip(held, found.cost.held_bytes, strict=True))
    return Price(view, risk).seconds(0, found) + kept * found.cost.kept_bytes + most


@each_view
@pytest.mark.parametrize("risk", RISK_PRICES)
def test_at_dense_prices_the_value_is_that_of_the_best_pattern(name: str, risk: float) -> None:
    view = VIEWS[name]()
    columns = every_column(view, 0)
    block = BlockSolver(view, 0, UNIT, "highs")
    for (kept, held), price in itertools.product(directions(view.classes[0].stages), BYTE_PRICES):
        prices = kept * price, [price * one for one in held], risk
        pattern = block.priced(1.0, *prices, view.rho[0])
        best = min(cost(view, found, *prices) for found in columns)
        assert block.problem.objective.value() == pytest.approx(best, abs=1e-5)
        assert cost(view, column(view, 0, pattern), *prices) == pytest.approx(best, abs=1e-5)


@each_view
def test_the_bytes_of_each_pattern_are_those_of_the_simulator(name: str) -> None:
    view = VIEWS[name]()
    problem = pulp.LpProblem("fixed", pulp.LpMinimize)
    block = add_block(problem, view, 0, UNIT, "")
    problem.setObjective(pulp.lpSum(block.held))
    columns = every_column(view, 0)
    for found in columns[:: max(1, len(columns) // 100)]:
        fix(block, found.pattern)
        assert run(problem, "highs")
        assert block.kept.value() == pytest.approx(found.cost.kept_bytes, abs=1e-5)
        assert [held.value() for held in block.held] == pytest.approx(found.cost.held_bytes, abs=1e-5)


def fix(block: BlockProgram, pattern: Pattern) -> None:
    """Leave the program no choice but this pattern."""
    for unit, action in zip(block.cls.units, pattern, strict=True):
        forms = {form.action: variable for form, variable in block.coded.get(unit, ())}
        for other, variable in {"store": block.store[unit], **forms}.items():
            variable.lowBound = variable.upBound = int(other == action)


def sizes(found: Column) -> tuple[int, ...]:
    """What is kept, and held in forward and in the largest stage."""
    forward, *stages = found.cost.held_bytes
    return found.cost.kept_bytes, forward, max(stages)


@each_view
def test_within_limits_of_a_byte_the_fastest_pattern_is_found(name: str) -> None:
    view = VIEWS[name]()
    columns = every_column(view, 0)
    block = BlockSolver(view, 0, UNIT, "highs")
    corners = pareto(columns, view.rho)[::6]
    lesser = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    for corner, less, risk in itertools.product(corners, lesser, [0.0, 0.5]):
        limits = tuple(size - one for size, one in zip(sizes(corner), less, strict=True))
        fitting = [found for found in columns if all(map(le, sizes(found), limits))]
        pattern = block.within(*limits, risk, view.rho[0])
        if not fitting:
            assert pattern is None
            continue
        assert pattern is not None
        price = Price(view, risk)
        best = min(price.seconds(0, found) for found in fitting)
        chosen = column(view, 0, pattern)
        assert all(map(le, sizes(chosen), limits))
        assert price.seconds(0, chosen) == pytest.approx(best, abs=1e-5)


@each_view
def test_two_blocks_with_different_risks_at_limits_of_a_byte(name: str) -> None:
    view = twice(VIEWS[name]())
    price = Price(view, 0.75)
    columns = pareto(every_column(view, 0), view.rho)
    plans = sorted(
        (assemble(view, [block.cost for block in chosen]).peak_bytes, price.total(chosen))
        for chosen in itertools.product(columns, repeat=2)
    )
    peaks = sorted({peak for peak, _ in plans})
    for limit in (peaks[0] - 1, *peaks[:: max(1, len(peaks) // 8)]):
        found = solve_whole(price, rooms_at(view, limit), UNIT, "highs", 0.0)
        fitting = [seconds for peak, seconds in plans if peak <= limit]
        if not fitting:
            assert found is None
            continue
        assert found is not None
        chosen = [column(view, 0, pattern) for pattern in found[0]]
        assert assemble(view, [block.cost for block in chosen]).peak_bytes <= limit
        assert price.total(chosen) == pytest.approx(min(fitting), abs=1e-5)
        assert found[1] == pytest.approx(min(fitting), abs=1e-5)


@each_view
def test_patterns_priced_in_relax_to_what_all_patterns_do(name: str) -> None:
    """Column generation: prices of bytes and of risk have to find every pattern that the relaxation needs."""
    view = twice(VIEWS[name]())
    full = every_column(view, 0)
    least = Planner("highs").least(view).simulation.peak_bytes
    for room in (20, 60):
        bounds = []
        for pool in (None, full):
            site = Planner("highs").at(view, least + room)
            price = Price(view, 0.4)
            master = Master(price, site.rooms, site.scale, "highs", site.blocks, grouped(view, 2))
            master.add(0, site.chains[0] if pool is None else pool)
            relaxed = master.relax(1e-6)
            assert relaxed is not None
            bounds.append(relaxed.bound)
        assert bounds[0] == pytest.approx(bounds[1], abs=1e-3)
