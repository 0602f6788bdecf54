"""Whether a micro-batch begins without any gradient: then what gradients will take is free until they arise."""

from __future__ import annotations

import torch
from torch import nn

from hilore_plan.schema.record import GradientState


class Gradients:
    """Looks at a model's gradients as a micro-batch begins.

    Where gradients may be elsewhere than in the parameters' `grad`, they count as live: DDP keeps them in buckets from
    the start, and sharded models free no more than a rank's own part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last: nn.Parameter | None = None

    def state(self) -> GradientState:
        """`none` if no parameter of the model, frozen ones included, has a gradient."""
        if self._last is not None and self._last.grad is not None:
            return "live"  # all but the first micro-batch of an update end here
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "live"
        self._last = next((parameter for parameter in self._model.parameters() if parameter.grad is not None), None)
        return "none" if self._last is None else "live"
