"""Steps of calibration micro-batches: their exposures, gradients and errors, for the benchmarks beside this file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hilore_plan.exposure.exposure import relative
from hilore_plan.profiler.batches import CalibrationBatch
from hilore_plan.profiler.error import squared, squared_distance
from hilore_plan.runtime.attach import Runtime

Gradients = list[torch.Tensor]


def exposures_of(batches: Sequence[CalibrationBatch]) -> tuple[float, ...]:
    """Exposures in multiples of their mean."""
    mean = sum(batch.exposure for batch in batches) / len(batches)
    return tuple(relative(batch.exposure, mean) for batch in batches)


def step_gradients(
    model: nn.Module, batches: Sequence[CalibrationBatch], exposures: Sequence[float], runtime: Runtime | None
) -> Gradients:
    """The accumulated gradients of one step, which the model no longer has."""
    model.zero_grad(set_to_none=True)
    for batch, exposure in zip(batches, exposures, strict=True):
        if runtime is None:
            batch.loss(model).backward()  # type: ignore[no-untyped-call]
            continue
        with runtime.microbatch(exposure=exposure):
            loss = batch.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def relative_error(mine: Gradients, exact: Gradients) -> float:
    """`|mine - exact| / |exact|`."""
    return math.sqrt(squared_distance(list(mine), list(exact)) / squared(exact))
