"""Micro-batches of a trainer by what is known of them before forward; where that is nothing, each is the riskiest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hilore_plan.errors import UsageError
from hilore_plan.runtime.attach import Runtime
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.microbatch import Microbatch
from hilore_plan.schema.plan import Plan

# what reading a trainer's objects and tensors can end in: another version, a subclass, a value that is not finite
_UNREADABLE = (UsageError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)


class Exposures:
    """Tells the micro-batches of a trainer from each other, and never stops a training that would go on without a plan.

    Args:
        read: gives what `Runtime.microbatch` takes beside the tokens, from what the trainer passes to `microbatch`.
        plan: whose entries are chosen. It may have a single bucket of exposure: then nothing is warned of.
    """

    def __init__(self, read: Callable[..., dict[str, Any]], plan: Plan) -> None:
        self._read = read
        self._warned = all(entry.exposure_up_to is None for entry in plan.entries)

    def microbatch(self, runtime: Runtime, *given: Any, tokens: int | None = None, check: bool = False) -> Microbatch:
        """The context of a micro-batch, with its exposure if that can be read from what is given."""
        try:
            return runtime.microbatch(tokens=tokens, check=check, **self._read(*given))
        except _UNREADABLE as error:
            self._warn(error)
            return runtime.microbatch(tokens=tokens, check=check)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"hilore: the exposure of this trainer's loss is not known ({_said(error)}): "
                "such a micro-batch counts as the riskiest",
                HiloreWarning,
                stacklevel=4,
            )


def _said(error: Exception) -> str:
    """An error in one line; that of a missing key is nothing but the key."""
    if isinstance(error, UsageError):
        return error.message
    return f"no {error} is there" if isinstance(error, KeyError) else str(error)
