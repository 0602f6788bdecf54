"""The error for something kept that is no longer what it was (R2)."""

from __future__ import annotations

import torch

from hilore_plan.errors import RecoveryError

UNTRACKED = -1


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place. Tensors made under `inference_mode` do not count that."""
    try:
        return tensor._version
    except RuntimeError:  # asking first would take longer than all the rest
        return UNTRACKED


def changed_in_place(what: str) -> RecoveryError:
    """The error that names what was modified between forward and backward."""
    return RecoveryError(
        f"{what} was modified in place between forward and backward",
        "run backward before the optimizer step or the in-place operation, or copy the tensor first",
    )
