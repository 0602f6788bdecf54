"""The slope of each loss's policy term and KL term, before masks, weights and normalisers.

With A the advantage, lr the log of the importance ratio and r = exp(lr), the term l of one token depends on log-probs
in two ways: `direct` is dl/dlogp of that token alone, `ratio` is dl/dlr. At token level lr = logp - old, so the two add
up; at sequence level all tokens of a row share one lr, and `coefficients.py` spreads `ratio` over them.

Forms as in TRL 1.16's `GRPOTrainer._compute_loss`, differentiated by hand. Where a loss has a kink, the slope is the
one that torch gives: `clamp` passes both of its limits, and `min` of two equal values gives half to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hilore_plan.exposure.losses import CLIPPED, LossConfig, LossType

# TRL's limits on log-ratios in VESPO
_LOWEST = math.log(1e-8)
_HIGHEST = 20.0


class Slopes(NamedTuple):
    """`dl/dlogp` of the token itself, and `dl/dlr`; each `[B, T]`, `[B, 1]`, or None where it is zero."""

    direct: Tensor | None = None
    ratio: Tensor | None = None


class Terms(NamedTuple):
    """What the slopes are made of, all of one floating dtype.

    `log_ratio` is `[B, T]`, logp - old per token. `advantages` and `weights` are `[B, T]` or `[B, 1]`; `mask` `[B, T]`.
    """

    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None


def policy_slopes(config: LossConfig, terms: Terms, ratio: Tensor) -> Slopes:
    """The slopes of the policy term.

    Args:
        config: the loss.
        terms: see `Terms`.
        ratio: r, `[B, T]` or, at sequence level, `[B, 1]`.
    """
    return _POLICY[config.loss_type](config, terms, ratio)


def kl_slopes(config: LossConfig, distance: Tensor, ratio: Tensor) -> Slopes:
    """The slopes of the KL term, without beta: with d = logp - ref, k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1.

    `k3_unbiased` is r k3 with r differentiable, as in DeepSeek-V3.2 (TRL's default since 1.10). At token level its two
    parts, r (1 - exp(-d)) and r (exp(-d) + d - 1), come to r d: written so, since the parts cancel.

    Args:
        config: the loss.
        distance: d, `[B, T]`.
        ratio: r, `[B, T]` or, at sequence level, `[B, 1]`.
    """
    if config.kl_estimator == "k1":
        return Slopes(direct=torch.ones_like(distance))
    if config.kl_estimator == "k2":
        return Slopes(direct=distance)
    falling = torch.expm1(-distance)
    if config.kl_estimator == "k3":
        return Slopes(direct=-falling)
    if not config.per_sequence:
        return Slopes(direct=ratio * distance)
    return Slopes(direct=-falling * ratio, ratio=(falling + distance) * ratio)


def _clipped(config: LossConfig, terms: Terms, ratio: Tensor) -> Slopes:
    """With l = -min(min(r, delta) A, clamp(r, 1 - eps, 1 + eps_high) A): -A r where the smaller one is not flat."""
    low, high = 1 - config.epsilon, 1 + config.upper
    delta = math.inf if config.delta is None else config.delta
    first = ratio.clamp(max=delta) * terms.advantages
    second = ratio.clamp(low, high) * terms.advantages
    of_first = torch.where(first == second, 0.5, (first < second).to(ratio.dtype))
    passes = of_first * (ratio <= delta) + (1 - of_first) * ((ratio >= low) & (ratio <= high))
    return Slopes(ratio=-terms.advantages * ratio * passes)


def _cispo(config: LossConfig, terms: Terms, ratio: Tensor) -> Slopes:
    """With l = -min(r, eps_high) A logp, the ratio detached: an absolute cap, which cuts no token's gradient off."""
    return Slopes(direct=-ratio.clamp(max=config.upper) * terms.advantages)


def _sapo(config: LossConfig, terms: Terms, ratio: Tensor) -> Slopes:
    """With l = -A (4 / tau) s, s = sigmoid(tau (r - 1)), tau by the sign of A (SAPO): dl/dlr = -4 A s (1 - s) r."""
    temperature = _either(terms.advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1))
    return Slopes(ratio=-4 * terms.advantages * gate * (1 - gate) * ratio)


def _vespo(config: LossConfig, terms: Terms, ratio: Tensor) -> Slopes:
    """With l = -phi(w) A logp, phi detached (VESPO): phi(w) = exp(lam + k log w - lam w); k and lam by the sign of A.

    w is the product of the row's ratios, and of its importance weights, which do not multiply the loss.
    """
    del ratio
    log_w = (terms.log_ratio.clamp(-_HIGHEST, _HIGHEST) * terms.mask).sum(-1, keepdim=True)
    if terms.weights is not None:
        log_w = log_w + terms.weights.log().clamp(_LOWEST, _HIGHEST).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LOWEST, _HIGHEST)
    gains = terms.advantages >= 0
    k = _either(gains, config.vespo_k_pos, config.vespo_k_neg, log_w.dtype)
    lam = _either(gains, config.vespo_lambda_pos, config.vespo_lambda_neg, log_w.dtype).clamp(min=1e-4)
    phi = (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Slopes(direct=-phi * terms.advantages)


def _either(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """As `torch.where`, which would round two plain numbers to the default dtype."""
    first, second = (torch.full((), value, dtype=dtype, device=condition.device) for value in (yes, no))
    return torch.where(condition, first, second)


_Rule = Callable[[LossConfig, Terms, Tensor], Slopes]
_POLICY: dict[LossType, _Rule] = {
    **dict.fromkeys(CLIPPED, _clipped),
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
