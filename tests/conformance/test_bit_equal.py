"""With any exact plan, every gradient of every parameter is bit-equal to the gradient without a plan."""

from __future__ import annotations

import warnings

import plans
import pytest
import torch
from models import MODELS, Case

from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.plan import Plan

# for each way of running a family: with and without padding, in two dtypes, these make eight plans a family
RANDOM_PLANS = 2
# a captured shape, and later another length for the same graph: the first frame of a graph is a trial, the next is not
SHAPES = ((3, 11), (1, 24), (3, 37), (1, 9))


WAYS = [
    pytest.param(
        case,
        padding,
        dtype,
        id=f"{name}-{'padded' if padding else 'whole'}-{str(dtype).split('.')[1]}",
        marks=pytest.mark.xdist_group(name),  # a family's code is imported once
    )
    for name, case in MODELS.items()
    for padding in (False, True)
    for dtype in case.dtypes
    if case.padded or not padding
]


@pytest.mark.parametrize(("case", "padding", "dtype"), WAYS)
def test_gradients_are_bit_equal_under_any_exact_plan(case: Case, padding: bool, dtype: torch.dtype) -> None:
    expected = reference(case, dtype, padding)
    variants = Variants()  # one capture for all plans
    model = case.build(dtype=dtype)
    runtime = check(case, dtype, padding, plans.make_plan(model), expected, variants)
    graphs = plans.graphs_of(runtime)
    for choice in [plans.store, plans.cast, *map(plans.seeded, seeds(padding, dtype))]:
        check(case, dtype, padding, plans.make_plan(model, plans.choose(graphs, choice)), expected, variants)


def seeds(padding: bool, dtype: torch.dtype) -> range:
    """Other random plans for each way of running a family."""
    first = RANDOM_PLANS * (2 * padding + (dtype == torch.bfloat16))
    return range(first, first + RANDOM_PLANS)


def reference(case: Case, dtype: torch.dtype, padding: bool) -> list[dict[str, torch.Tensor]]:
    """The gradients without a plan, for each shape in turn."""
    model = case.build(dtype=dtype)
    return [case.gradients(model, case.make_inputs(*shape, seed=1, padding=padding)) for shape in SHAPES]


def check(
    case: Case,
    dtype: torch.dtype,
    padding: bool,
    plan: Plan,
    expected: list[dict[str, torch.Tensor]],
    variants: Variants,
) -> Runtime:
    """Run all shapes and compare."""
    model = case.build(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with apply(model, plan) as runtime:
            runtime.variants = variants
            for shape, want in zip(SHAPES, expected, strict=True):
                got = case.gradients(model, case.make_inputs(*shape, seed=1, padding=padding))
                assert_bit_equal(got, want)
    report = runtime.report()
    assert not report.fallbacks
    assert not report.stored_instead
    assert report.frames == len(plan.block_names) * len(SHAPES)
    return runtime


def assert_bit_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    wrong = [name for name in want if not torch.equal(got[name], want[name])]
    assert not wrong, f"gradients differ: {wrong[:5]}"
