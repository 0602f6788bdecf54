"""The settings of a GRPO-like loss that its coefficients depend on, under the names of TRL's `GRPOConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hilore_plan.errors import UsageError

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"]
Level = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]
WeightMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
CLIPPED: tuple[LossType, ...] = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")

_CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": get_args(Level),
    "kl_estimator": get_args(KLEstimator),
    "vllm_importance_sampling_mode": get_args(WeightMode),
}
_NOT_NEGATIVE = ("epsilon", "epsilon_high", "delta", "beta", "off_policy_mask_threshold", "top_entropy_quantile")
_POSITIVE = ("sapo_temperature_pos", "sapo_temperature_neg", "max_completion_length")


@dataclass(frozen=True)
class LossConfig:
    """One loss. Every field but two has the name and meaning that TRL 1.16's `GRPOConfig` gives it.

    The two are `kl_estimator` (TRL's `use_bias_correction_kl=True` is `k3_unbiased`, False is `k3`) and
    `has_auxiliary_loss` (a MoE router loss is added: the trainer's `aux_loss_enabled`). GSPO is `loss_type="grpo"` with
    `importance_sampling_level="sequence"`. `epsilon_high=None` means `epsilon`; for `cispo` it caps the ratio itself,
    not its distance from 1. Only `dr_grpo` needs `max_completion_length`.

    Raises:
        UsageError: a choice that does not exist, or a number that no loss can have.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3_unbiased"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int | None = None
    vllm_importance_sampling_mode: WeightMode = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    has_auxiliary_loss: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown", f"it is one of {', '.join(choices)}")
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not _fits(name, value):
                raise UsageError(f"{name}={value!r} makes no sense in a loss", "give what the trainer was given")

    @property
    def upper(self) -> float:
        """`epsilon_high`, or `epsilon` where it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def per_sequence(self) -> bool:
        """Whether all tokens of a row share one ratio."""
        return self.importance_sampling_level == "sequence"

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the entropy is part of the loss; its gradient does not pass through the log-probs."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy


def _fits(name: str, value: float) -> bool:
    if not math.isfinite(value):
        return False
    return value > 0 if name in _POSITIVE else value >= 0 or name not in _NOT_NEGATIVE
