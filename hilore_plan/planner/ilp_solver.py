"""The solvers behind PuLP: which there are, and how they are run so that the same input gives the same plan."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import pulp

from hilore_plan.errors import HiloreError, UsageError

Program: TypeAlias = Any  # PuLP ships no types: a problem, or a solver
Expression: TypeAlias = Any  # a PuLP variable, a linear expression, or a plain number
Constraint: TypeAlias = Any  # a PuLP constraint

SOLVERS = ("highs", "cbc")
SEED = 1
FEASIBLE_POINT = 2  # HiGHS: kSolutionStatusFeasible
# A safety net only. A solution cut off by the clock may differ from run to run, so the programs are kept small enough.
TIME_LIMIT_SECONDS = 120.0
# Bytes are counted in units that keep a limit below this: solvers compare with a tolerance of 1e-6, which is then less
# than half a byte up to 2^38 bytes, and a unit is a power of two, so that no coefficient is rounded.
LARGEST_LIMIT = 2**20


class SolverError(HiloreError):
    """A solver that broke down; the caller falls back to the best plan it knows."""

    exit_code = 1


@dataclass(frozen=True)
class Scale:
    """The units in which a solver sees bytes and seconds."""

    byte_unit: float
    second_unit: float

    def bytes(self, count: float) -> float:
        """Bytes in the solver's unit."""
        return count / self.byte_unit

    def room(self, count: float) -> float:
        """A limit in the solver's unit, half a byte up: between what is allowed and what is not."""
        return (count + 0.5) / self.byte_unit


def scale_for(limit_bytes: int, seconds: float) -> Scale:
    """Units for a limit, and for `seconds` that are to look like a thousand."""
    exponent = max(0, math.ceil(math.log2(max(limit_bytes, 1) / LARGEST_LIMIT)))
    return Scale(float(2**exponent), seconds / 1000 if seconds > 0 else 1.0)


def check_solver(name: str) -> None:
    """Refuse a solver that does not exist or is not installed.

    Raises:
        UsageError: naming the solvers there are.
    """
    if name not in SOLVERS:
        raise UsageError(f"there is no solver {name!r}", hint=f"choose one of: {', '.join(SOLVERS)}")
    if not _solver(name, 0.0, False, None).available():
        other = SOLVERS[1 - SOLVERS.index(name)]
        raise UsageError(f"the solver {name!r} is not installed", hint=f"install it, or use --solver {other}")


def run(problem: Program, solver: str, *, gap: float = 0.0, relaxed: bool = False, nodes: int | None = None) -> bool:
    """Solve a PuLP problem to an absolute gap (solver units), or its linear relaxation; False if it is infeasible.

    The search stops after `nodes` nodes of the tree with the best solution found, in the same place every time.

    Raises:
        SolverError: if the solver found neither a solution nor a proof that there is none.
    """
    try:
        status = _status(problem, _solver(solver, gap, relaxed, nodes))
    except pulp.PulpSolverError as error:
        raise SolverError(f"the solver {solver!r} failed: {error}") from error
    if status == pulp.LpStatusInfeasible:
        return False
    if status != pulp.LpStatusOptimal or problem.objective.value() is None:
        raise SolverError(f"the solver {solver!r} gave up: {pulp.LpStatus[status]}")
    return True


def bound(problem: Program, gap: float) -> float:
    """A lower bound on the optimum of a problem just solved to `gap`."""
    value = float(problem.objective.value())
    model = getattr(problem, "solverModel", None)
    if model is None:
        return value - gap
    return min(value, float(model.getInfo().mip_dual_bound))


def _status(problem: Program, solver: Program) -> int:
    try:
        return int(problem.solve(solver))
    except KeyError:
        # PuLP 3.3 has no name for the state in which HiGHS stops at the node limit; the values are assigned by then
        found = problem.solverModel.getInfo().primal_solution_status == FEASIBLE_POINT
        return int(pulp.LpStatusOptimal if found else pulp.LpStatusNotSolved)


@cache
def _swallow_banner() -> None:
    """Keep stdout clean: highspy 1.16 writes a banner to it once per process, whatever its options."""
    try:
        stdout = os.dup(1)
    except OSError:  # no stdout at all
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        problem = pulp.LpProblem("banner")
        problem += problem.add_variable("nothing", 0, 1) >= 0
        problem.solve(pulp.HiGHS(msg=False, parallel="off"))
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def _solver(name: str, gap: float, relaxed: bool, nodes: int | None) -> Program:
    options: dict[str, object] = {
        "mip": not relaxed,
        "msg": False,
        "timeLimit": TIME_LIMIT_SECONDS,
        "gapAbs": gap,
        "gapRel": 0.0,
    }
    if name == "cbc":
        seeds = [f"randomSeed {SEED}", f"randomCbcSeed {SEED}"]
        return pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, threads=1, maxNodes=nodes, options=seeds, **options)
    _swallow_banner()
    return pulp.HiGHS(parallel="off", random_seed=SEED, mip_max_nodes=nodes, **options)
