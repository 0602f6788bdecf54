"""`hilore apply PLAN --regroup -- torchrun ...`: each of two ranks regroups its own rows and picks its own entries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from models import FAMILIES
from setups.torchrun import RANKS, TORCHRUN, run
from setups.trl_gradients import Gradients, int8_everywhere, relative_errors, risk_of
from setups.trl_runs import Setup, make_model
from tolerances import OTHER_ORDER_FP32

from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.meter import LEAST
from hilore_plan.schema.io import save
from hilore_plan.schema.plan import Plan

pytestmark = [pytest.mark.setups, pytest.mark.xdist_group("distributed")]

SCRIPT = str(Path(__file__).parent / "launched_uneven.py")
# the first eight micro-batches count as the riskiest, which are two steps of four
STEPS, CAREFUL_STEPS = 4, LEAST // 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is that is trained; else both ranks would write it at the same time."""
    folder = tmp_path_factory.mktemp("regrouped")
    make_model(Setup(), folder)
    return folder


@pytest.fixture(scope="module")
def planned(folder: Path) -> tuple[Plan, list[BlockGraph]]:
    """A plan that recomputes all, and the graphs of its blocks."""
    model = make_model(Setup(), folder)
    llama, plan = FAMILIES["llama"], plans.make_plan(model)
    with apply(model, plan) as runtime:
        llama.loss(model, llama.make_inputs(2, 9, seed=0, padding=True)).backward()
        return plan, plans.graphs_of(runtime)


@pytest.fixture(scope="module")
def unplanned(folder: Path) -> Gradients:
    """Gradients without a plan, each rank's rows in the micro-batches that the trainer made."""
    return gradients(folder, folder / "unplanned")


def gradients(folder: Path, stem: Path, *before: str) -> Gradients:
    """Of each step, the same on all ranks."""
    done = run([*before, *TORCHRUN, SCRIPT, str(folder), str(stem), str(STEPS)])
    assert done.returncode == 0, done.stderr
    first, *others = (torch.load(f"{stem}.{rank}", weights_only=True) for rank in range(RANKS))
    assert len(first) == STEPS
    for other in others:
        assert all(torch.equal(got[name], want[name]) for got, want in zip(other, first, strict=True) for name in want)
    return first


def regrouped(folder: Path, tmp_path: Path, plan: Plan) -> tuple[Gradients, list[dict[str, Any]]]:
    """Gradients under a plan with each step's rows regrouped, and the reports of the ranks."""
    saved, report = tmp_path / "plan.json", tmp_path / "report.json"
    save(plans.loadable(plan), saved)
    apply_regrouped = (sys.executable, "-m", "hilore_plan", "apply", str(saved), "--regroup", "--report", str(report))
    found = gradients(folder, tmp_path / "regrouped", *apply_regrouped, "--")
    return found, json.loads(report.read_text())["processes"]


def test_an_exact_plan_changes_nothing_but_the_order_of_sums(
    folder: Path, tmp_path: Path, planned: tuple[Plan, list[BlockGraph]], unplanned: Gradients
) -> None:
    got, reports = regrouped(folder, tmp_path, planned[0])
    assert max(relative_errors(got, unplanned)) < OTHER_ORDER_FP32
    assert [report["rank"] for report in reports] == [*range(RANKS)]
    for report in reports:
        assert 0 < report["regrouped"]["tokens"] < report["regrouped"]["tokens_before"]


def test_a_compressing_plan_stays_within_its_risk(
    folder: Path, tmp_path: Path, planned: tuple[Plan, list[BlockGraph]], unplanned: Gradients
) -> None:
    exact, graphs = planned
    risk = risk_of(graphs)
    plan = plans.by_exposure(exact, (1.0, risk, int8_everywhere(graphs)), (None, 0.0, [{}] * len(graphs)), limit=risk)
    got, reports = regrouped(folder, tmp_path, faster_at_low_exposure(plan))
    errors = relative_errors(got, unplanned)
    assert max(errors[:CAREFUL_STEPS]) < OTHER_ORDER_FP32
    assert all(OTHER_ORDER_FP32 < error < risk for error in errors[CAREFUL_STEPS:])
    uses = [[entry["frames"] for entry in report["runtimes"][0]["entries"]] for report in reports]
    assert uses[0] != uses[1]  # of rows of their own, in entries of their own
    assert all(min(frames) > 0 for frames in uses)


def faster_at_low_exposure(plan: Plan) -> Plan:
    """The plan with steps of low exposure predicted faster, without which rows are grouped by their lengths alone."""
    low, *others = plan.entries
    fast = low.predicted.model_copy(update={"step_seconds": low.predicted.step_seconds / 2})
    return plan.model_copy(update={"entries": (low.model_copy(update={"predicted": fast}), *others)})
