"""What TRL's `GRPOTrainer` knows of a micro-batch right before its forward, as `Runtime.microbatch` takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch

from hilore_plan.errors import UsageError
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import Normaliser, normaliser_for
from hilore_plan.runtime.microbatch import Microbatch

LOG_PROBS = "_get_per_token_logps_and_entropies"


def loss_config(trainer: Any) -> LossConfig:
    """The trainer's loss; settings that its version of TRL does not have keep their defaults.

    Raises:
        UsageError: the trainer has a loss that is not known here.
    """
    arguments = trainer.args
    if not hasattr(arguments, "loss_type"):
        raise UsageError(f"{type(trainer).__name__} names no loss_type")
    names = {field.name for field in fields(LossConfig)} - {"kl_estimator", "has_auxiliary_loss"}
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    corrected = getattr(arguments, "use_bias_correction_kl", False)
    return LossConfig(
        **given,
        kl_estimator="k3_unbiased" if corrected else "k3",
        has_auxiliary_loss=bool(getattr(trainer, "aux_loss_enabled", False)),
    )


def read(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for `Runtime.microbatch`, for a micro-batch of a trainer.

    Raises:
        UsageError: a part of the loss's gradient is in no coefficient: that of an entropy bonus, or of a router's
            auxiliary loss.
    """
    config = loss_config(trainer)
    if config.has_entropy_bonus or config.has_auxiliary_loss:
        raise UsageError("a part of its gradient does not pass through the log-probs")
    return known_of(trainer, inputs, config)


def known_of(trainer: Any, inputs: dict[str, Any], config: LossConfig) -> dict[str, Any]:
    """What is known of rows before their forward, as `exposure.predict` takes it; `loss` and `normaliser` with it."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return {
        "loss": config,
        "advantages": inputs["advantages"],
        "mask": mask,
        "old_logps": inputs.get("old_per_token_logps"),
        "ref_logps": inputs.get("ref_per_token_logps"),
        "weights": inputs.get("importance_sampling_ratio"),
        "normaliser": _normaliser(trainer, inputs, config),
    }


def _normaliser(trainer: Any, inputs: dict[str, Any], config: LossConfig) -> Normaliser:
    return normaliser_for(
        config,
        accumulation=int(trainer.current_gradient_accumulation_steps),
        tokens=inputs.get("num_items_in_batch"),
        ranks=trainer.accelerator.num_processes,
        steps_per_generation=trainer.args.steps_per_generation,
    )


@contextmanager
def observed(trainer: Any, micro_batch: Microbatch) -> Iterator[None]:
    """Has the log-probs of the training forward observed: those that the trainer's own method gives first."""
    original = getattr(trainer, LOG_PROBS, None)
    if original is None or micro_batch.absolute is None:
        yield
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        log_probs = result[0] if isinstance(result, tuple) else result
        if isinstance(log_probs, torch.Tensor) and log_probs.requires_grad:
            micro_batch.observe(log_probs, loss_scale=_loss_scale(trainer))
        return result

    before = vars(trainer).get(LOG_PROBS)
    setattr(trainer, LOG_PROBS, watched)
    try:
        yield
    finally:
        if before is None:
            delattr(trainer, LOG_PROBS)
        else:
            setattr(trainer, LOG_PROBS, before)


def _loss_scale(trainer: Any) -> float:
    """What the loss is multiplied by before backward: fp16's scale, and what accelerate divides by."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    scale = float(scaler.get_scale()) if scaler is not None else 1.0
    return scale / float(getattr(trainer.accelerator, "gradient_accumulation_steps", 1) or 1)
