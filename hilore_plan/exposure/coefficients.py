"""The coefficients c_t = dLoss/dlogp_t of a micro-batch in closed form: what backward starts with, without running it.

For a loss that is the sum over rows i and tokens t of Z_i m_it (w_it keep_it l_it + beta KL_it):

    token level     c_it = Z_i m_it (w_it keep_it dl_it/dlogp_it + beta dKL_it/dlogp_it)
    sequence level  what passes through the row's shared ratio, lr_i = (1 / n_i) sum over t of m_it (logp - old)_it, is
                    summed over the row and spread: c_it += (m_it / n_i) sum over u of Z_i m_iu (...) dl_iu/dlr_i

| loss | dl/dlogp, with r the ratio and A the advantage |
| --- | --- |
| grpo, bnpo, dapo, dr_grpo, luspo | -A r; 0 if A > 0 and r > 1 + eps_high, if A < 0 and r < 1 - eps or r > delta |
| cispo | -A min(r, eps_high) |
| sapo | -4 A s (1 - s) r with s = sigmoid(tau (r - 1)) |
| vespo | -A phi(w) with phi(w) = exp(lam + k log w - lam w) and w the row's product of ratios |

Z_i is in `normalisers.py`, the KL estimators and what happens exactly at a limit in `slopes.py`. Source: TRL 1.16,
`GRPOTrainer._compute_loss`. An entropy bonus and a MoE auxiliary loss do not pass through the log-probs: their gradient
is in no coefficient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hilore_plan.errors import UsageError
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import Normaliser, row_lengths
from hilore_plan.exposure.slopes import Slopes, Terms, kl_slopes, policy_slopes


class Batch(NamedTuple):
    """A micro-batch's tensors, checked and in one floating dtype of at least fp32.

    `advantages`, `weights` and `keep` are `[B, T]` or `[B, 1]`, the rest `[B, T]`. Without `logps` the ratio is 1.
    """

    mask: Tensor
    advantages: Tensor
    logps: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    weights: Tensor | None = None
    keep: Tensor | None = None

    @property
    def terms(self) -> Terms:
        """What the policy slopes are made of."""
        known = self.logps is not None and self.old_logps is not None
        log_ratio = self.logps - self.old_logps if known else torch.zeros_like(self.mask)  # type: ignore[operator]
        return Terms(log_ratio, self.advantages, self.mask, self.weights)


def coefficients(
    config: LossConfig,
    *,
    logps: Tensor | None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
    normaliser: Normaliser,
) -> Tensor:
    """dLoss/dlogp of every response token; see the formulas above.

    Args:
        config: the loss.
        logps: `[B, T]` log-probs of the policy. None only where nothing depends on them: on-policy and without KL.
        old_logps: `[B, T]`; None: on-policy, the ratio is exactly 1.
        ref_logps: `[B, T]`, needed if `config.beta` is not 0.
        advantages: `[B]`, or `[B, 1]` or `[B, T]`.
        mask: `[B, T]` of any dtype, 1 where a token counts and 0 elsewhere.
        weights: detached importance weights, `[B]`, `[B, 1]` or `[B, T]`. They multiply the policy term; in VESPO they
            are part of the row's ratio instead.
        keep: 1 where the policy term is kept and 0 where it is dropped (off-policy mask, entropy mask), in the shapes
            of `weights`. Other than `mask` it changes no count.
        normaliser: what the loss divides by.

    Returns:
        `[B, T]`, on the inputs' device, in their widest dtype but at least fp32.

    Raises:
        UsageError: a value that is not finite, a shape that does not fit, or log-probs that the loss needs are missing.
    """
    batch = prepared(config, mask, advantages, logps, old_logps, ref_logps, weights, keep)
    return assemble(config, batch, normaliser)


def prepared(
    config: LossConfig,
    mask: Tensor,
    advantages: Tensor,
    logps: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
) -> Batch:
    """The tensors checked and in one dtype; see `coefficients` for what they are and what is refused."""
    given = {"logps": logps, "old_logps": old_logps, "ref_logps": ref_logps, "weights": weights, "keep": keep}
    given = {"mask": mask, "advantages": advantages, **given}
    if mask.dim() != 2:
        raise UsageError(
            f"mask has the shape {list(mask.shape)}, expected [rows, tokens]", "give one row per completion"
        )
    _refuse_missing(config, given)
    dtype = torch.float32
    for tensor in given.values():
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    shaped = {name: _shaped(name, tensor, mask, dtype) for name, tensor in given.items() if tensor is not None}
    refuse_non_finite(shaped)
    return Batch(**shaped)


def assemble(config: LossConfig, batch: Batch, normaliser: Normaliser) -> Tensor:
    """The coefficients of prepared tensors, `[B, T]`."""
    terms = batch.terms
    ratio = importance_ratio(config, terms)
    share = normaliser.factors(batch.mask) * batch.mask
    result = _spread(config, policy_slopes(config, terms, ratio), share * policy_weight(config, batch), batch.mask)
    if config.beta != 0:
        assert batch.logps is not None
        assert batch.ref_logps is not None
        slopes = kl_slopes(config, batch.logps - batch.ref_logps, ratio)
        result = result + _spread(config, slopes, config.beta * share, batch.mask)
    return result


def importance_ratio(config: LossConfig, terms: Terms) -> Tensor:
    """The ratio r of each token, `[B, T]`, or the geometric mean of a row's (GSPO), `[B, 1]`."""
    if not config.per_sequence:
        return terms.log_ratio.exp()
    return ((terms.log_ratio * terms.mask).sum(-1, keepdim=True) / row_lengths(terms.mask)).exp()


def policy_weight(config: LossConfig, batch: Batch) -> Tensor:
    """What multiplies the policy term of each token, broadcast to `[B, T]`."""
    weight = torch.ones_like(batch.mask)
    if batch.weights is not None and config.loss_type != "vespo":
        weight = weight * batch.weights
    return weight if batch.keep is None else weight * batch.keep


def refuse_non_finite(tensors: dict[str, Tensor]) -> None:
    """Stops before a NaN becomes an exposure that looks like any other number.

    Raises:
        UsageError: naming the tensor and how many of its values are not finite.
    """
    # asked once for all tensors: every question to a GPU waits for it
    fine = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
    for (name, tensor), is_fine in zip(tensors.items(), fine, strict=True):
        if not is_fine:
            count = int((~tensor.isfinite()).sum())
            raise UsageError(f"{name} has {count} values that are not finite", f"find out where {name} is computed")


def _spread(config: LossConfig, slopes: Slopes, share: Tensor, mask: Tensor) -> Tensor:
    result = torch.zeros_like(mask) if slopes.direct is None else share * slopes.direct
    if slopes.ratio is None:
        return result
    through = share * slopes.ratio
    if config.per_sequence:
        through = through.sum(-1, keepdim=True) * mask / row_lengths(mask)
    return result + through


def _refuse_missing(config: LossConfig, given: dict[str, Tensor | None]) -> None:
    if given["old_logps"] is not None and given["logps"] is None:
        raise UsageError("old_logps are given without logps, so no ratio is known", "give both, or neither on-policy")
    if config.beta != 0 and (given["logps"] is None or given["ref_logps"] is None):
        raise UsageError(f"beta={config.beta} asks for a KL term, which needs logps and ref_logps", "give both")


def _shaped(name: str, tensor: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, T]`; advantages, weights and keep may be `[B, 1]` too, and `[B]` is taken as that."""
    rows, tokens = mask.shape
    allowed = [(rows, tokens)]
    if name in ("advantages", "weights", "keep"):
        tensor = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
        allowed.append((rows, 1))
    if tuple(tensor.shape) not in allowed:
        raise UsageError(
            f"{name} has the shape {list(tensor.shape)}, which does not fit the mask's {list(mask.shape)}",
            "give tensors of one micro-batch, one row per completion",
        )
    return tensor.detach().to(dtype)
