"""Random blocks under random plans: every gradient is that of the same run without a plan, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import plans
import pytest
import random_blocks
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_blocks import Model, token_ids
from runtime.rig import Gradients, assert_bit_equal, no_warnings
from torch import nn

from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.frame import live_frames
from hilore_plan.runtime.meter import LEAST
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.plan import Plan

Shapes = Sequence[tuple[int, int]]
SHAPES = st.lists(random_blocks.SHAPES, min_size=2, max_size=3)


@settings(max_examples=15)
@given(random_blocks.models(), SHAPES, st.integers(0, 2**16))
def test_gradients_are_bit_equal_under_any_exact_plan(model: Model, shapes: Shapes, seed: int) -> None:
    want = [gradients(model, model.build(), shape, number) for number, shape in enumerate(shapes)]
    assume(all(gradient.isfinite().all() for found in want for gradient in found.values()))
    variants = Variants()
    runtime = check(model, plans.make_plan(model.build()), shapes, want, variants)
    graphs = plans.graphs_of(runtime)
    for choice in (plans.store, plans.seeded(seed)):
        check(model, plans.make_plan(model.build(), plans.choose(graphs, choice)), shapes, want, variants)


def check(model: Model, plan: Plan, shapes: Shapes, want: list[Gradients], variants: Variants) -> Runtime:
    """Run all shapes under a plan: nothing falls back, nothing stays behind."""
    built = model.build()
    with no_warnings(), apply(built, plan) as runtime:
        runtime.variants = variants
        for number, (shape, expected) in enumerate(zip(shapes, want, strict=True)):
            assert_bit_equal(gradients(model, built, shape, number), expected)
    report = runtime.report()
    assert report.frames == len(plan.block_names) * len(shapes)
    assert not report.fallbacks
    assert not report.stored_instead
    assert live_frames() == 0
    return runtime


def gradients(model: Model, built: nn.Module, shape: tuple[int, int], seed: int) -> Gradients:
    return model.case().gradients(built, token_ids(shape, seed), seed=seed)


@pytest.mark.filterwarnings("ignore:.*nothing could rebuild it exactly:hilore_plan.runtime.block.HiloreWarning")
@settings(max_examples=6)
@given(random_blocks.models(dtypes=(torch.bfloat16,)), SHAPES)
def test_what_is_compressed_comes_back_bit_for_bit_where_a_micro_batch_is_riskier(model: Model, shapes: Shapes) -> None:
    want = [gradients(model, model.build(), shape, number) for number, shape in enumerate(shapes)]
    assume(all(gradient.isfinite().all() for found in want for gradient in found.values()))
    variants = Variants()
    graphs = plans.graphs_of(check(model, plans.make_plan(model.build()), shapes, want, variants))
    built = model.build()
    low, high = (plans.choose(graphs, choice) for choice in (plans.compress("int8"), lambda value: "recompute"))
    with apply(built, plans.by_exposure(plans.make_plan(built), (1.0, 0.01, low), (None, 0.0, high))) as runtime:
        runtime.variants = variants
        for number, (shape, expected) in enumerate(zip(shapes, want, strict=True)):
            runtime.meter.seen, runtime.meter.mean = LEAST, 1.0
            assert_bit_equal(escalated(model, built, runtime, shape, number), expected)
    assert live_frames() == 0


def escalated(model: Model, built: nn.Module, runtime: Runtime, shape: tuple[int, int], seed: int) -> Gradients:
    """Gradients of a micro-batch that was said to be of no exposure, and turns out to be of much."""
    built.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with runtime.microbatch(coefficients=torch.full((1, 1), 0.5)) as micro_batch:
        loss = model.case().loss(built, token_ids(shape, seed))
        micro_batch.observe(loss, loss_scale=0.1)
    loss.backward()
    assert runtime.escalations == seed + 1
    return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}
