"""The rows of a step as `regroup` takes them, from the tensors that a loop has before the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hilore_plan.errors import UsageError
from hilore_plan.exposure.exposure import Norm
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import Normaliser
from hilore_plan.exposure.predict import predict
from hilore_plan.exposure.regroup import Row
from hilore_plan.exposure.zeros import may_skip, signal_free_rows, why_zero


def rows_of_coefficients(
    loss: LossConfig, coefficients: Tensor, tokens: Sequence[int], *, norm: Norm = "l2"
) -> list[Row]:
    """Rows from exact coefficients: those that are all 0 are silent, where the loss allows that conclusion.

    Args:
        loss: what is trained.
        coefficients: `[B, T]`, of all rows of the step.
        tokens: the length of each row as it is padded, prompt included.
        norm: of an exposure.

    Raises:
        UsageError: another number of lengths than rows, or coefficients that are not finite.
    """
    return _rows(tokens, coefficients, signal_free_rows(loss, coefficients), norm)


def step_rows(
    loss: LossConfig,
    tokens: Sequence[int],
    *,
    advantages: Tensor,
    mask: Tensor,
    normaliser: Normaliser,
    norm: Norm = "l2",
    **known: Any,
) -> list[Row]:
    """Rows from what is known before the forward; all tensors are those of the whole step.

    A row is silent if each of its tokens is masked, has the advantage 0 or the weight 0, whatever the policy has become
    when its forward comes. What a predicted ratio would clip is not: the ratio may turn out another.

    Args:
        loss: what is trained.
        tokens: the length of each row as it is padded, prompt included.
        advantages: as in `predict.predict`, as are the rest.
        mask: `[B, T]`.
        normaliser: what the loss divides by.
        norm: of an exposure.
        known: `old_logps`, `last_logps`, `ref_logps`, `weights`, `keep`.

    Raises:
        UsageError: a tensor that does not fit or is not finite, or another number of lengths than rows.
    """
    predicted = predict(loss, advantages=advantages, mask=mask, normaliser=normaliser, **known).coefficients
    weights, keep = known.get("weights"), known.get("keep")
    zeros = why_zero(loss, logps=None, advantages=advantages, mask=mask, weights=weights, keep=keep)
    silent = (zeros.mask | zeros.advantage | zeros.weight).all(-1)
    return _rows(tokens, predicted, silent & may_skip(loss).allowed, norm)


def _rows(tokens: Sequence[int], coefficients: Tensor, silent: Tensor, norm: Norm) -> list[Row]:
    if len(tokens) != len(coefficients):
        raise UsageError(f"{len(tokens)} lengths for {len(coefficients)} rows", "give the length of every row")
    sizes = coefficients.detach().double()
    exposures = torch.linalg.vector_norm(sizes, 2 if norm == "l2" else 1, dim=-1).tolist()
    return [
        Row(length, exposure, quiet) for length, exposure, quiet in zip(tokens, exposures, silent.tolist(), strict=True)
    ]
