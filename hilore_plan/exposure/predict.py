"""The coefficients before forward, from what is known then."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import Normaliser


class Prediction(NamedTuple):
    """Predicted coefficients, `[B, T]`; whether they are exact, and what they rest on, in words.

    Where they are not exact, `observe` gives the true exposure at the start of backward.
    """

    coefficients: Tensor
    exact: bool
    basis: str


def predict(
    config: LossConfig,
    *,
    advantages: Tensor,
    mask: Tensor,
    normaliser: Normaliser,
    old_logps: Tensor | None = None,
    last_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
) -> Prediction:
    """The coefficients as far as they are known before forward; shapes and errors as in `coefficients.coefficients`.

    Without `old_logps` the trainer takes the policy's own log-probs for them: the ratio is exactly 1, and nothing
    depends on log-probs but a KL term. Otherwise the newest log-probs of the same rows stand in for those of the coming
    forward: `last_logps`, or else `old_logps`, which gives the ratio 1.

    An entropy mask is not known before forward: if the loss has one, all tokens are taken as kept, so the policy part
    of the prediction is an upper bound.
    """
    newest = old_logps if last_logps is None else last_logps
    without_kl = config.beta != 0 and (newest is None or ref_logps is None)
    found = coefficients(
        replace(config, beta=0.0) if without_kl else config,
        logps=newest,
        old_logps=old_logps,
        ref_logps=None if without_kl else ref_logps,
        advantages=advantages,
        mask=mask,
        weights=weights,
        keep=keep,
        normaliser=normaliser,
    )
    doubts = _doubts(config, old_logps, last_logps, without_kl=without_kl, kept=keep is not None)
    return Prediction(found, not doubts, "; ".join(doubts) or "on-policy: the ratio is exactly 1")


def _doubts(
    config: LossConfig, old_logps: Tensor | None, last_logps: Tensor | None, *, without_kl: bool, kept: bool
) -> list[str]:
    """Why the prediction is not exact."""
    doubts = []
    if old_logps is not None:
        doubts.append(
            "the ratio is that of the last log-probs" if last_logps is not None else "the ratio is taken as 1"
        )
    if without_kl:
        doubts.append("the KL term is left out: no log-probs are known yet")
    elif config.beta != 0:
        doubts.append("the KL term is that of the newest log-probs")
    if config.top_entropy_quantile < 1:
        doubts.append("tokens may be dropped by their entropy, which forward gives")
    if config.off_policy_mask_threshold is not None and not kept:
        doubts.append("rows may be dropped as off-policy, which forward decides")
    return doubts
