"""Importance weights and off-policy masks, for trainers that do not hand theirs over.

Both correct for a sampler whose log-probs differ from the policy's. They are constants to autograd. Source: TRL 1.16,
`GRPOTrainer._generate_and_score_completions` and `get_off_policy_mask`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hilore_plan.errors import UsageError
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import row_lengths


def importance_weights(config: LossConfig, *, old_logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
    """The weight exp(old - sampling) of each token or, in the `sequence_*` modes, of the product over each row.

    Outside `vllm_importance_sampling_clip_min` to `..._clip_max` the `*_truncate` modes clip it, the `*_mask` modes
    make it 0. A token that the sampler could not score (NaN) counts as equal.

    Args:
        config: the loss, for its mode and limits.
        old_logps: `[B, T]`, of the policy that the rollouts came from, as the trainer computes them.
        sampling_logps: `[B, T]`, as the sampler gave them.
        mask: `[B, T]`, 1 where a token counts.

    Returns:
        `[B, T]`, or `[B, 1]` in the `sequence_*` modes.
    """
    difference = ((old_logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    level, action = config.vllm_importance_sampling_mode.split("_")
    ratio = (difference.sum(-1, keepdim=True) if level == "sequence" else difference).exp()
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if action == "mask":
        outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
        return ratio.masked_fill(outside, 0.0)
    return ratio if low is None and high is None else ratio.clamp(min=low, max=high)


def off_policy_keep(
    config: LossConfig, *, logps: Tensor, sampling_logps: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """1 for rows that stay, 0 for those of negative advantage whose mean log-ratio exceeds the threshold.

    The log-ratio is sampling - logp, a mean over the row's counted tokens (DeepSeek-V3.2, equation 9).

    Args:
        config: the loss, for its `off_policy_mask_threshold`.
        logps: `[B, T]`, of the policy.
        sampling_logps: `[B, T]`; a NaN counts as equal.
        advantages: `[B]`, `[B, 1]` or `[B, T]`.
        mask: `[B, T]`, 1 where a token counts.

    Returns:
        `[B, 1]`, or `[B, T]` where advantages are: the `keep` of `coefficients`.

    Raises:
        UsageError: the loss has no threshold.
    """
    if config.off_policy_mask_threshold is None:
        raise UsageError("the loss has no off_policy_mask_threshold", "set it in LossConfig, or leave this mask out")
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    gap = ((sampling_logps - logps).nan_to_num(nan=0.0) * mask).sum(-1, keepdim=True) / row_lengths(mask)
    return ((advantages >= 0) | (gap <= config.off_policy_mask_threshold)).to(torch.float32)
