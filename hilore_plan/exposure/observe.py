"""The exact exposure at the first instant of backward, whatever the loss is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from hilore_plan.errors import UsageError
from hilore_plan.exposure.exposure import Norm, unchecked_exposure


class Handle(Protocol):
    """What takes a hook away again."""

    def remove(self) -> None:
        """Take the hook away; a second call does nothing."""


def observe(logps: Tensor, callback: Callable[[float], None], *, norm: Norm = "l2", loss_scale: float = 1.0) -> Handle:
    """Calls `callback` once with the micro-batch's exposure when backward reaches the log-probs.

    The gradient of the log-probs is the coefficients: with the KL term, clipping, weights and normaliser that the loss
    really has. It is there before any block's backward begins, if the loss depends on blocks through `logps`. The
    gradient itself is not touched. A second backward through a retained graph does not call again. The norm is brought
    to the CPU, which waits for all of forward on a GPU: do without where a prediction is exact.

    Args:
        logps: what the model's output became and the loss is made from, the very tensor; any shape.
        callback: gets the exposure, infinite if a coefficient is not finite (a loss scaler may still skip that step, so
            it is no error here). What it raises comes out of `backward()`.
        norm: as in `exposure.exposure`.
        loss_scale: what the loss is multiplied by before backward, as by a loss scaler for fp16.

    Returns:
        A handle, to remove the hook if backward never comes.

    Raises:
        UsageError: the log-probs need no gradient, so that backward will not pass them.
    """
    if not logps.requires_grad:
        raise UsageError("these log-probs need no gradient", "observe those of the training forward, not under no_grad")
    handle: Handle = logps.register_hook(_Once(callback, norm, loss_scale))  # type: ignore[no-untyped-call]
    return handle


class _Once:
    """The hook. It holds the callback until it has called it, and never the log-probs: no cycle, nothing kept alive."""

    def __init__(self, callback: Callable[[float], None], norm: Norm, loss_scale: float) -> None:
        self._callback: Callable[[float], None] | None = callback
        self._norm: Norm = norm
        self._loss_scale = loss_scale

    def __call__(self, gradient: Tensor) -> None:
        if self._callback is None:
            return
        callback, self._callback = self._callback, None
        value = unchecked_exposure(gradient, self._norm) / self._loss_scale
        callback(value if math.isfinite(value) else math.inf)
