"""The error for something kept that is no longer what it was (R2)."""

from __future__ import annotations

from hilore_plan.errors import RecoveryError


def changed_in_place(what: str) -> RecoveryError:
    """The error that names what was modified between forward and backward."""
    return RecoveryError(
        f"{what} was modified in place between forward and backward",
        "run backward before the optimizer step or the in-place operation, or copy the tensor first",
    )
