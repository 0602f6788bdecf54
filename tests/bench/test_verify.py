"""Verification against a machine that is played: tightening, loosening, giving up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from strategies import llama_profile

from hilore_plan.bench import verify as verify_file
from hilore_plan.bench.verify import corrections, verify_plan
from hilore_plan.errors import InfeasibleBudgetError
from hilore_plan.planner.plan import solve_plan
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.record import GradientState, Workload

PROFILE = llama_profile(blocks=3)
BUDGET = "1.1x-gc"


class Machine:
    """Stands in for the worker: the measured peak is a function of the peak predicted by the first plan's model."""

    measure: Callable[[int], int]
    plans: list[Plan]

    def __init__(self, mode: str, workload: Workload, device: str, *, plan: Path) -> None:
        self._load(plan)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _load(self, path: Path) -> None:
        type(self).plans.append(load_plan(path))

    def replan(self, plan: Path, workload: Workload) -> None:
        self._load(plan)

    def warm(self) -> None:
        pass

    def entry_peak_bytes(self, gradients: GradientState, exposure_up_to: float | None) -> int:
        return type(self).measure(self.raw())

    def raw(self) -> int:
        """The peak without corrections: that of the plan's actions."""
        first = type(self).plans[0].entries[-1].predicted.peak_bytes
        corrected = type(self).plans[-1].entries[-1].predicted.peak_bytes
        return corrected - type(self).extra if len(type(self).plans) > 1 else first

    extra = 0

    def step_seconds(self) -> float:
        return 1.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    solve = verify_file.solve_plan

    def remember(*args: object, **kwargs: object) -> Plan:
        found = kwargs["correction"]
        assert isinstance(found, dict)
        Machine.extra = found[max(found)]
        return solve(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(verify_file, "solve_plan", remember)
    monkeypatch.setattr(verify_file, "ModeProcess", Machine)
    Machine.plans, Machine.extra = [], 0
    return Machine


def plan() -> Plan:
    return solve_plan(PROFILE, budget=BUDGET, token_buckets=2)


def test_a_plan_that_is_inside_is_kept_and_measured(machine: type[Machine]) -> None:
    machine.measure = staticmethod(lambda raw: raw)
    first = plan()
    verified = verify_plan(first, PROFILE)
    measured = verified.entries[-1].measured
    assert measured is not None
    assert measured.peak_bytes <= verified.budget.limit_bytes
    assert verified.entries[0].measured is None


def test_a_plan_that_is_over_is_tightened(machine: type[Machine]) -> None:
    limit = plan().budget.limit_bytes
    machine.measure = staticmethod(lambda raw: raw + limit // 50)
    verified = verify_plan(plan(), PROFILE)
    measured = verified.entries[-1].measured
    assert measured is not None
    assert measured.peak_bytes <= verified.budget.limit_bytes == limit
    assert len(machine.plans) > 1


def test_spare_bytes_are_used_once(machine: type[Machine]) -> None:
    machine.measure = staticmethod(lambda raw: raw - raw // 20)
    first = plan()
    verified = verify_plan(first, PROFILE)
    assert verified.entries[-1].predicted.step_seconds <= first.entries[-1].predicted.step_seconds
    measured = verified.entries[-1].measured
    assert measured is not None
    assert measured.peak_bytes <= verified.budget.limit_bytes


def test_a_budget_that_cannot_be_kept_is_an_error(machine: type[Machine]) -> None:
    machine.measure = staticmethod(lambda raw: 3 * raw)
    with pytest.raises(InfeasibleBudgetError):
        verify_plan(plan(), PROFILE)


def test_an_excess_counts_in_full_and_spare_bytes_by_tokens() -> None:
    assert corrections([10, 20], 7) == {10: 7, 20: 7}
    assert corrections([10, 20], -8) == {10: -4, 20: -8}
