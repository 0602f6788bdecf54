"""Which coefficients are exactly zero and why, and when that means that there is no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hilore_plan.exposure.coefficients import importance_ratio, policy_weight, prepared
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.slopes import policy_slopes


class Skipping(NamedTuple):
    """Whether rows with only zero coefficients may be treated as having no gradient, and why (not), in words."""

    allowed: bool
    reason: str


class Zeros(NamedTuple):
    """Where the policy term's coefficient is exactly zero, by the first cause that applies; each `[B, T]`, bool.

    `mask`: the token does not count. `advantage`: A is 0. `weight`: an importance weight of 0, or not kept. `flat`: the
    loss does not depend on this ratio: it is clipped, or beyond what the dtype can tell apart.
    """

    mask: Tensor
    advantage: Tensor
    weight: Tensor
    flat: Tensor

    def counts(self) -> dict[str, int]:
        """How many coefficients each cause made zero; waits for the device."""
        return {name: int(found.sum()) for name, found in self._asdict().items()}


def why_zero(
    config: LossConfig,
    *,
    logps: Tensor | None,
    old_logps: Tensor | None = None,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
) -> Zeros:
    """The causes of the zeros in a policy term; arguments and errors as in `coefficients.coefficients`.

    At sequence level tokens share a ratio, hence `flat` holds for a whole row at once. (Advantages that differ within a
    row may still cancel: such a zero has no cause here.)
    """
    # the KL term is not asked about, so its log-probs are not needed
    batch = prepared(replace(config, beta=0.0), mask, advantages, logps, old_logps, None, weights, keep)
    slopes = policy_slopes(config, batch.terms, importance_ratio(config, batch.terms))
    slope = slopes.direct if slopes.ratio is None else slopes.ratio
    assert slope is not None
    causes = (batch.mask == 0, batch.advantages == 0, policy_weight(config, batch) == 0, slope == 0)
    found = []
    unexplained = torch.ones_like(batch.mask, dtype=torch.bool)
    for cause in causes:
        found.append(cause & unexplained)
        unexplained = unexplained & ~cause
    return Zeros(*found)


def may_skip(config: LossConfig) -> Skipping:
    """Whether zero coefficients mean zero gradient under this loss."""
    if config.beta != 0:
        return Skipping(False, f"beta={config.beta}: the KL term has a gradient wherever the policy left its reference")
    if config.has_entropy_bonus:
        return Skipping(False, "the entropy bonus has a gradient that does not pass through the log-probs")
    if config.has_auxiliary_loss:
        return Skipping(False, "the router's auxiliary loss has a gradient for every token, whatever its advantage")
    return Skipping(True, "the loss depends on the policy through the log-probs alone")


def signal_free_rows(config: LossConfig, coefficients: Tensor) -> Tensor:
    """Rows that contribute nothing at all to the gradient; none where the loss does not allow that conclusion.

    Only a coefficient that is exactly 0 counts: advantages centred over a batch are not 0 for a group of equal rewards.
    To leave out the backward of such rows is the caller's choice: where it is done on one rank only, collectives no
    longer match, and a step without any backward leaves `grad=None`, which Adam treats otherwise than zeros.

    Args:
        config: the loss.
        coefficients: `[B, T]`.

    Returns:
        `[B]`, bool.
    """
    if not may_skip(config).allowed:
        return torch.zeros(len(coefficients), dtype=torch.bool, device=coefficients.device)
    return (coefficients == 0).all(-1)
