"""The trainers that hilore knows: where TRL defines them, and the method that computes a micro-batch's loss.

Every Python process under `hilore apply` reads this table when it starts, so little is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hilore_plan.errors import RefusedError

# module -> the trainer class that it defines
TRAINERS = {
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.dpo_trainer": "DPOTrainer",
}
_GRPO_METHOD = "_compute_loss"
_METHOD = "compute_loss"
_IDS = (("prompt_ids", "completion_ids"), ("input_ids",))


def listed(names: Sequence[str]) -> str:
    """Names as a person lists them: `GRPOTrainer, SFTTrainer or DPOTrainer`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def loss_method(trainer_or_class: Any) -> str:
    """The name of the method that computes the loss of one micro-batch: called right before its backward.

    `GRPOTrainer` has `_compute_loss(model, inputs)`; every other subclass of transformers' `Trainer` is called through
    `compute_loss(model, inputs, ...)`, whatever it calls from there.

    Raises:
        RefusedError: it has neither.
    """
    method = getattr(trainer_or_class, _GRPO_METHOD, None)
    if callable(method) and _takes_inputs_only(method):
        return _GRPO_METHOD
    if callable(getattr(trainer_or_class, _METHOD, None)):
        return _METHOD
    name = getattr(trainer_or_class, "__name__", type(trainer_or_class).__name__)
    raise RefusedError(
        f"{name} has neither {_GRPO_METHOD} nor {_METHOD}, where a plan attaches",
        "give a trainer of TRL or transformers: pip install 'trl>=1.15'",
    )


def _takes_inputs_only(method: Any) -> bool:
    from inspect import signature

    return [name for name in signature(method).parameters if name != "self"] == ["model", "inputs"]


def count_tokens(inputs: Mapping[str, Any]) -> int | None:
    """Tokens of a micro-batch, padding included; None where its inputs have other names."""
    for names in _IDS:
        if all(name in inputs for name in names):
            tokens: int = sum(inputs[name].numel() for name in names)
            return tokens
    return None
