"""Loops around plain PyTorch leave the same parameters with an exact plan as without one, to the bit."""

from __future__ import annotations

import plans
import pytest
import tolerances
import torch
from models import Case
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, no_warnings
from runtime.test_compressed import LEVELS, compressed_units, log_probs, relative_error, two_buckets, unit
from setups.plain_loops import LOOPS, Loop, train

pytestmark = pytest.mark.setups

CASES = {case.name: case for case in (PLAIN, LLAMA)}


def compare(loop: Loop, case: Case, choice: plans.Choose | None, attach: Attach) -> None:
    model, reference = case.build(), case.build()
    runtime = attach(model) if choice is None else attach.chosen(case, choice, model)
    with no_warnings():
        assert_bit_equal(train(loop, case, model), train(loop, case, reference))
    report = runtime.report()
    assert report.frames > 0
    assert report.programs_run > 0
    assert not report.fallbacks
    assert not report.stored_instead


@pytest.mark.parametrize("choice", [None, plans.seeded(5)], ids=["recompute", "mixed"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_plan_changes_nothing(loop: Loop, choice: plans.Choose | None, attach: Attach) -> None:
    compare(loop, PLAIN, choice, attach)


@pytest.mark.parametrize("name", ["scaling_fp16", "optimizing_within_backward", "evaluating_between"])
def test_a_plan_changes_nothing_for_a_transformer(name: str, attach: Attach) -> None:
    compare(LOOPS[name], LLAMA, plans.seeded(5), attach)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_scaled_loss_is_compressed_within_its_risk(case: Case, attach: Attach) -> None:
    """The scale changes no exposure, so nothing is rebuilt for its sake; the gradient's error stays what it is."""
    model, reference = case.build(), case.build()
    runtime = two_buckets(attach, case, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(2):
        inputs, coefficients = case.make_inputs(2, 9, seed=step), unit((2, 8), 0.5)
        with runtime.microbatch(coefficients=coefficients) as micro_batch:
            logps = log_probs(model, inputs)
            micro_batch.observe(logps, loss_scale=scaler.get_scale())
            loss = (logps * coefficients).sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        (log_probs(reference, inputs) * coefficients).sum().backward()  # type: ignore[no-untyped-call]
        got, want = ({name: p.grad for name, p in each.named_parameters()} for each in (model, reference))
        error = relative_error({name: grad / scaler.get_scale() for name, grad in got.items()}, want)
        model.zero_grad()
        reference.zero_grad()
    assert 0 < error < tolerances.compressed_gradient(LEVELS["int8"], compressed_units(runtime))
    assert runtime.escalations == 0
