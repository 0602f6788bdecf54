"""One micro-batch: which plan entry its frames get, and what happens if it turns out riskier than that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from hilore_plan.errors import UsageError
from hilore_plan.exposure.observe import observe
from hilore_plan.runtime.alarm import Alarm
from hilore_plan.runtime.lookup import Lookup
from hilore_plan.runtime.meter import Meter
from hilore_plan.schema.record import GradientState, Norm

COUNTED = -1


class Owner(Protocol):
    """What a micro-batch needs of its runtime."""

    meter: Meter
    norm: Norm
    current: Microbatch
    escalations: int
    held_back: int
    lookup: Lookup
    gradients: GradientState  # as the forward now running found them

    @property
    def over_budget(self) -> bool:
        """Whether compression has lately caused more error than the plan allows."""

    def error_of(self, entry: int | None) -> float:
        """The relative gradient error that is expected under an entry."""


class Microbatch:
    """The context in which forwards get one plan entry.

    Args:
        runtime: whose micro-batch it is.
        tokens: its tokens; None: counted in each block's input.
        relative: its exposure in multiples of the mean; None: as much as any.
        absolute: its exposure as it was computed, if it was.
        checked: whether everything compressed must be able to come back exactly under any entry, for `true_error`.
    """

    __slots__ = (
        "_before",
        "_careful",
        "_gradients",
        "_held_back",
        "_runtime",
        "absolute",
        "alarm",
        "checked",
        "entry",
        "relative",
        "tokens",
    )

    def __init__(
        self,
        runtime: Owner,
        tokens: int | None,
        relative: float | None,
        absolute: float | None = None,
        checked: bool = False,
    ) -> None:
        self._runtime = runtime
        self.tokens = tokens
        self.relative = relative
        self.absolute = absolute
        self.checked = checked
        self._careful = bool(relative) and runtime.over_budget  # of exposure 0 nothing can err, and None is the highest
        self._held_back = False
        self.entry = None if tokens is None else self._look_up(tokens)
        self.alarm: Alarm | None = None

    def __enter__(self) -> Microbatch:
        self._before = self._runtime.current
        self._runtime.current = self
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._runtime.current = self._before
        if kind is None:
            self._count()

    def find(self, tokens: int) -> int | None:
        """The entry of a frame with so many tokens."""
        if self.tokens is None:
            self.entry = self._look_up(tokens)  # R8
        elif self._gradients != self._runtime.gradients:  # known when a forward begins
            self.entry = self._look_up(self.tokens)
        return self.entry

    def _look_up(self, tokens: int) -> int | None:
        self._gradients = self._runtime.gradients
        found = self._runtime.lookup.find(tokens, self.relative, self._gradients)
        if not self._careful:
            return found
        careful = self._runtime.lookup.find(tokens, None, self._gradients)
        self._held_back = careful != found
        return careful

    def observe(self, logps: torch.Tensor, *, loss_scale: float = 1.0) -> None:
        """Check the exposure at the first instant of backward, when the exact coefficients are there.

        If it belongs to a riskier bucket than the one chosen, everything compressed is rebuilt exactly.

        Args:
            logps: the log-probs that the loss is made from, the very tensor.
            loss_scale: what the loss is multiplied by before backward.

        Raises:
            UsageError: the exposure was not computed from coefficients, so that there is nothing to compare with.
        """
        if self.absolute is None:
            raise UsageError(
                "this micro-batch cannot be checked: its exposure was not computed from coefficients",
                "give coefficients=, or advantages= and mask=, to microbatch()",
            )
        observe(logps, self._settle, norm=self._runtime.norm, loss_scale=loss_scale)

    def _count(self) -> None:
        """Forward is over: the exposure counts as predicted, until it is known better; one never known, as the mean."""
        meter, error = self._runtime.meter, self._runtime.error_of(self.entry)
        self._runtime.held_back += self._held_back
        if self.absolute is not None:
            meter.see(self.absolute)
            meter.count(self.absolute, error)
        elif self.relative is not None:
            meter.count(self.relative, error)
        else:
            meter.count(meter.mean or 1.0, error)

    def _settle(self, exact: float) -> None:
        runtime = self._runtime
        relative = runtime.meter.relative(exact)
        riskier = runtime.lookup.is_riskier(relative, self.entry)
        if riskier and self.alarm is not None:
            self.alarm.raised = True
            runtime.escalations += 1
        assert self.absolute is not None
        error = runtime.error_of(self.entry)
        runtime.meter.count(self.absolute, error, sign=-1)
        runtime.meter.count(exact, 0.0 if riskier else error)

    def true_error(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> float:
        """The relative error of this micro-batch's gradient: two backward passes more, one of them exact.

        The graph is kept for the training's own backward. For parameters that are whole on this rank only.

        Args:
            loss: a scalar, made inside this context with `microbatch(..., check=True)`.
            parameters: those that are trained.

        Returns:
            `|g - g_exact| / |g_exact|` over all parameters, 0.0 where the exact gradient is zero.
        """
        alarm = self.alarm
        if alarm is None:
            return 0.0
        alarm.open = True
        try:
            mine = _gradient(loss, parameters)
            alarm.raised = True
            exact = _gradient(loss, parameters)
        finally:
            alarm.raised = False
            alarm.open = False
        difference = sum(float((a - b).double().square().sum()) for a, b in zip(mine, exact, strict=True))
        reference = sum(float(gradient.double().square().sum()) for gradient in exact)
        return math.sqrt(difference / reference) if reference > 0 else 0.0


def _gradient(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True, materialize_grads=True)
