"""The cases of `models.py` are worth testing on: they build, they repeat, and their gradients reach everything."""

from __future__ import annotations

import pytest
import torch
from models import MODELS, Case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
def test_two_builds_give_equal_gradients_of_every_parameter(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make_inputs(3, 17, seed=1, padding=case.padded)
    first, second = (case.gradients(case.build(dtype), inputs) for _ in range(2))
    model = case.build(dtype)
    assert first.keys() == dict(model.named_parameters()).keys()
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name])
        assert gradient.isfinite().all()
    assert sum(gradient.float().norm() > 0 for gradient in first.values()) > len(first) * 0.8


@pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
def test_one_row_and_another_length(case: Case) -> None:
    inputs = case.make_inputs(1, 11, seed=2)
    assert case.gradients(case.build(torch.bfloat16), inputs)


def test_random_cases_draw_from_the_seed() -> None:
    case = MODELS["dropout"]
    inputs = case.make_inputs(2, 8, seed=1)
    model = case.build()
    same, again = case.gradients(model, inputs, seed=3), case.gradients(model, inputs, seed=3)
    other = case.gradients(model, inputs, seed=4)
    assert torch.equal(same["head.weight"], again["head.weight"])
    assert not torch.equal(same["head.weight"], other["head.weight"])


def test_a_case_without_mask_refuses_padding() -> None:
    with pytest.raises(ValueError, match="no padding mask"):
        MODELS["square"].make_inputs(1, 8, seed=0, padding=True)
