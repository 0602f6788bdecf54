"""The coefficients of a micro-batch of verl right before its forward, from verl's own loss.

That loss reads log-probs and data and nothing of the model. So before forward it is computed once with the old
log-probs in place of those to come, and its gradient with respect to them is the coefficients: in each mode of loss and
of aggregation, with weights and KL term, as verl has them. On-policy they are exact. What forward really gives is
observed at the start of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from hilore_plan.errors import UsageError
from hilore_plan.runtime.microbatch import Microbatch

# Modes of loss that may be computed once more without a trace: no random numbers, no collectives. `clip_cov` draws the
# tokens that it leaves out, and what a mode registered by a user does is not known.
MODES = ("vanilla", "cispo", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo")
_LOSS = "ppo_loss"


def read(micro_batch: Any, loss_function: Any) -> dict[str, Any]:
    """Arguments for `Runtime.microbatch`, for what verl's engine is given.

    Args:
        micro_batch: the engine's `TensorDict`, with jagged `input_ids`, `[B, prompt + response]`.
        loss_function: what makes the loss of it: a `partial` of verl's `ppo_loss`.

    Raises:
        UsageError: it is another loss, its mode is not known to be without side effects, or it has an entropy bonus.
    """
    _refuse_unknown(loss_function)
    with torch.enable_grad():
        log_probs = _old_log_probs(micro_batch).requires_grad_()
        loss, _ = loss_function(model_output={"log_probs": log_probs}, data=micro_batch)
        (coefficients,) = torch.autograd.grad(loss, log_probs)
    return {"coefficients": coefficients}


def observed(loss_function: Any, micro_batch: Microbatch, scaler: Any = None) -> Any:
    """The loss function, which has the log-probs observed that it is given; itself where nothing can be compared.

    Args:
        loss_function: a function that `read` knows.
        micro_batch: the context that its forward runs in.
        scaler: the engine's gradient scaler, if it has one.
    """
    if micro_batch.absolute is None:
        return loss_function

    @wraps(_function(loss_function))
    def watched(*args: Any, model_output: dict[str, Any], **kwargs: Any) -> Any:
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        micro_batch.observe(model_output["log_probs"], loss_scale=loss_scale)
        return loss_function(*args, model_output=model_output, **kwargs)

    return watched


def _function(loss_function: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = loss_function.func if isinstance(loss_function, partial) else loss_function
    return function


def _refuse_unknown(loss_function: Any) -> None:
    function = _function(loss_function)
    name = getattr(function, "__name__", type(function).__name__)
    if name != _LOSS or not function.__module__.startswith("verl."):
        raise UsageError(f"{name} is not verl's {_LOSS}")
    config = loss_function.keywords["config"]
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode not in MODES:
        raise UsageError(f"the loss mode {mode} is none of {', '.join(MODES)}")
    if config.entropy_coeff != 0:
        raise UsageError("the gradient of an entropy bonus does not pass through the log-probs")


def _old_log_probs(micro_batch: Any) -> torch.Tensor:
    """The old log-probs where forward's would be: `[tokens]`, row after row without padding, 0 at prompts."""
    from verl.workers.utils.padding import no_padding_2_padding

    old = micro_batch["old_log_probs"]
    old = old.to_padded_tensor(0.0) if old.is_nested else old
    places = torch.arange(micro_batch["input_ids"].values().numel(), device=old.device)
    of_responses = no_padding_2_padding(torch.ones_like(places), micro_batch).bool()
    log_probs = torch.zeros(places.shape, dtype=torch.float32, device=old.device)
    log_probs[no_padding_2_padding(places, micro_batch)[of_responses]] = old[of_responses].float()
    return log_probs
