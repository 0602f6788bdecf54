"""With any exact plan, every gradient of every parameter is bit-equal to the gradient without a plan."""

from __future__ import annotations

import warnings

import plans
import pytest
import torch
from models import MODELS, Case

from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.schema.plan import Plan

RANDOM_PLANS = 5
# the captured shape first, then others: another length, another batch
SHAPES = ((3, 11), (1, 24), (3, 37))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_equal_under_any_exact_plan(name: str, padding: bool, dtype: torch.dtype) -> None:
    case = MODELS[name]
    if dtype not in case.dtypes or (padding and not case.padded):
        pytest.skip("not a case: the family's CPU kernels, or its blocks, do not take this")
    expected = reference(case, dtype, padding)
    everything = plans.make_plan(case.build(dtype=dtype))
    runtime = check(case, dtype, padding, everything, expected)
    graphs = plans.graphs_of(runtime)
    for choice in [plans.store, plans.cast, *map(plans.seeded, range(RANDOM_PLANS))]:
        plan = plans.make_plan(case.build(dtype=dtype), plans.choose(graphs, choice))
        check(case, dtype, padding, plan, expected)


def reference(case: Case, dtype: torch.dtype, padding: bool) -> list[dict[str, torch.Tensor]]:
    """The gradients without a plan, for each shape in turn."""
    model = case.build(dtype=dtype)
    return [case.gradients(model, case.make_inputs(*shape, seed=1, padding=padding)) for shape in SHAPES]


def check(
    case: Case, dtype: torch.dtype, padding: bool, plan: Plan, expected: list[dict[str, torch.Tensor]]
) -> Runtime:
    """Run all shapes twice (the first frame of a block is a trial, the second is not) and compare."""
    model = case.build(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with apply(model, plan) as runtime:
            for _ in range(1 if case.stateful else 2):
                for shape, want in zip(SHAPES, expected, strict=True):
                    got = case.gradients(model, case.make_inputs(*shape, seed=1, padding=padding))
                    assert_bit_equal(got, want)
    report = runtime.report()
    assert not report.fallbacks
    assert not report.stored_instead
    assert report.frames == len(plan.block_names) * len(SHAPES) * (1 if case.stateful else 2)
    return runtime


def assert_bit_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    wrong = [name for name in want if not torch.equal(got[name], want[name])]
    assert not wrong, f"gradients differ: {wrong[:5]}"
