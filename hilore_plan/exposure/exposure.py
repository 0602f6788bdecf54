"""The exposure of a micro-batch: how much it can move the policy, as one number."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hilore_plan.errors import UsageError

Norm = Literal["l2", "l1"]
_ORDERS: dict[str, int] = {"l2": 2, "l1": 1}


def exposure(coefficients: Tensor, norm: Norm = "l2") -> float:
    """The norm of a micro-batch's coefficients.

    Compression adds an error to the gradient that is linear in the coefficients and independent from token to token, so
    its expected square is risk times the sum of c_t^2: `l2`. The preprint adds up |c_t| instead: `l1`.

    Args:
        coefficients: of any shape, jagged ones too; no elements have the exposure 0.
        norm: `l2` or `l1`.

    Returns:
        The norm, summed up in fp64. This waits for the device.

    Raises:
        UsageError: a coefficient that is not finite, or an unknown norm.
    """
    value = unchecked_exposure(coefficients, norm)
    if not math.isfinite(value):
        raise UsageError(
            "the coefficients have values that are not finite", "look at log-probs and advantages for them"
        )
    return value


def unchecked_exposure(coefficients: Tensor, norm: Norm = "l2") -> float:
    """As `exposure`, but NaN or infinite where a coefficient is."""
    if norm not in _ORDERS:
        raise UsageError(f"the norm {norm!r} of an exposure is unknown", f"it is one of {', '.join(_ORDERS)}")
    found = coefficients.detach()
    flat = (found.values() if found.is_nested else found).reshape(-1)
    return float(torch.linalg.vector_norm(flat, _ORDERS[norm], dtype=torch.float64))


def relative(value: float, mean: float) -> float:
    """An exposure in units of the mean over the calibration micro-batches: the unit of a plan's buckets.

    Raises:
        UsageError: a value that is negative or not finite, or a mean that is not above 0.
    """
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"an exposure of {value} makes no sense", "an exposure is a finite number, at least 0")
    if not (math.isfinite(mean) and mean > 0):
        raise UsageError(f"exposures cannot be related to a mean of {mean}", "calibrate on micro-batches with a signal")
    return value / mean
