"""Compressing plans in TRL's trainers: the gradient of each step stays within the plan's risk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
from setups.trl_gradients import STILL, Gradients, int8_everywhere, recorder, relative_errors, risk_of
from setups.trl_runs import BLOCKS, MARKS, STEPS, Make, Run, Setup, make_dpo, make_grpo, make_sft, train

from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.runtime.meter import LEAST, Meter
from hilore_plan.schema.plan import Plan

pytestmark = MARKS

NOT_ZERO: dict[str, Any] = {"init_lora_weights": False}
SETUPS: dict[str, tuple[Make, Setup]] = {
    "grpo": (make_grpo, Setup(STILL)),
    "grpo-lora": (make_grpo, Setup(STILL, adapter=NOT_ZERO)),
    "grpo-dora": (make_grpo, Setup(STILL, adapter={**NOT_ZERO, "use_dora": True})),
    "grpo-gspo": (make_grpo, Setup({**STILL, "loss_type": "grpo", "importance_sampling_level": "sequence"})),
    "grpo-off-policy": (make_grpo, Setup({**STILL, "num_iterations": 2, "beta": 0.04})),
    "grpo-autocast": (make_grpo, Setup({**STILL, "bf16": True}, adapter=NOT_ZERO)),
    "sft": (make_sft, Setup(STILL)),
    "sft-lora": (make_sft, Setup(STILL, adapter=NOT_ZERO)),
    "dpo": (make_dpo, Setup(STILL)),
}


def run(make: Make, setup: Setup, folder: Path, plan: Plan | None, **options: Any) -> tuple[Run, Gradients]:
    gradients: Gradients = []
    trainer = make(setup, folder)
    trainer.add_callback(recorder(gradients))
    done = train(trainer, plan, **options)
    assert len(gradients) == STEPS
    return done, gradients


def graphs_of(make: Make, setup: Setup, folder: Path) -> tuple[list[BlockGraph], Plan]:
    """The graphs that training runs, and a plan for that model that recomputes all."""
    trainer = make(setup, folder)
    exact = plans.make_plan(trainer.model)
    done, _ = run(make, setup, folder, exact)
    assert done.runtime is not None
    return plans.graphs_of(done.runtime), exact


@pytest.mark.parametrize(("make", "setup"), SETUPS.values(), ids=SETUPS)
def test_the_gradient_of_a_step_stays_within_the_plans_risk(make: Make, setup: Setup, tmp_path: Path) -> None:
    graphs, exact = graphs_of(make, setup, tmp_path)
    risk = risk_of(graphs)
    plan = plans.by_exposure(exact, (None, risk, int8_everywhere(graphs)), limit=risk)
    _, want = run(make, setup, tmp_path, None)
    done, got = run(make, setup, tmp_path, plan)
    errors = relative_errors(got, want)
    assert all(0 < error < risk for error in errors), (errors, risk)
    assert done.runtime is not None
    report = done.runtime.report()
    assert not report.stored_instead
    assert report.expected_error == pytest.approx(risk)


@pytest.mark.parametrize("name", ["grpo", "grpo-lora", "grpo-off-policy"])
def test_riskier_micro_batches_are_exact(name: str, tmp_path: Path) -> None:
    make, setup = SETUPS[name]
    graphs, exact = graphs_of(make, setup, tmp_path)
    risk = risk_of(graphs)
    plan = plans.by_exposure(exact, (1.0, risk, int8_everywhere(graphs)), (None, 0.0, [{}] * BLOCKS), limit=risk)
    _, want = run(make, setup, tmp_path, None)
    _, got = run(make, setup, tmp_path, plan, meter=Meter(seen=LEAST, mean=1e-9))
    assert relative_errors(got, want) == [0.0] * STEPS
    _, got = run(make, setup, tmp_path, plan, meter=Meter(seen=LEAST, mean=1e9))
    assert all(0 < error < risk for error in relative_errors(got, want))
