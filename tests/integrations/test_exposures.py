"""What a trainer's micro-batches are taken for, where reading them goes well and where it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import plans
import pytest
import torch
from models import FAMILIES

from hilore_plan.integrations.exposures import Exposures
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.meter import LEAST, Meter

CASE = FAMILIES["llama"]
BLOCKS = 3
LOW, HIGH = 0, 1


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A plan with an entry up to the mean exposure and one above; the mean is known, and 1."""
    model = CASE.build()
    plan = plans.by_exposure(plans.make_plan(model), (1.0, 0.01, [{}] * BLOCKS), (None, 0.0, [{}] * BLOCKS))
    with apply(model, plan) as runtime:
        runtime.meter = Meter(seen=LEAST, mean=1.0)
        yield runtime


def norm(value: float) -> dict[str, Any]:
    return {"coefficients": torch.tensor([[value, 0.0]])}


def test_what_is_read_chooses_the_entry(runtime: Runtime) -> None:
    exposures = Exposures(norm, runtime.plan)
    assert exposures.microbatch(runtime, 0.5, tokens=9).entry == LOW
    assert exposures.microbatch(runtime, 1.5, tokens=9, check=True).entry == HIGH


def missing(_: float) -> dict[str, Any]:
    return {"coefficients": {}["advantages"]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda _: norm(float("nan")), "values that are not finite"),
        (missing, "no 'advantages' is there"),
        (lambda _: {"advantages": torch.ones(2)}, "mask are needed"),
        (lambda _: {"coefficients": torch.ones(2) @ torch.ones(3)}, "inconsistent tensor size"),
    ],
)
def test_what_cannot_be_read_is_the_riskiest_and_warned_of_once(
    runtime: Runtime, read: Callable[[float], dict[str, Any]], said: str
) -> None:
    exposures = Exposures(read, runtime.plan)
    with pytest.warns(HiloreWarning, match=f"{said}.*counts as the riskiest"):
        found = exposures.microbatch(runtime, 0.5, tokens=9)
    assert found.entry == HIGH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exposures.microbatch(runtime, 0.5, tokens=9).entry == HIGH


def test_with_one_bucket_there_is_nothing_to_warn_of() -> None:
    model = CASE.build()
    with apply(model, plans.make_plan(model)) as runtime, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Exposures(missing, runtime.plan).microbatch(runtime, 0.5, tokens=9).entry == LOW
