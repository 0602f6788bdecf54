"""Exposures relative to their mean, and the step error that they come to.

A plan's buckets count in multiples of the mean exposure. The absolute size of a coefficient depends on what the loss
divides by (tokens of a generation, accumulated micro-batches), which differs from run to run and from calibration. But
a common factor changes no relative error, so the mean is that of the run itself.

A plan keeps its limit on the step error for the mix of exposures that was calibrated. A run whose exposures are spread
otherwise would err more: `errs_more_than` says so, and the runtime then takes the most careful entries until the recent
error is within it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# fewer exposures than this say little about their mean: until then a micro-batch counts as the riskiest
LEAST = 8
# the mean and the recent error follow a run whose exposures drift, over about so many micro-batches
WINDOW = 256
SLACK = 1e-6  # relative: a sum of squares may come out that much above the square of the limit


@dataclass
class Meter:
    """The mean of the exposures seen, and the squared error that compression is expected to have caused.

    `counted` is the micro-batches that the error is of.
    """

    seen: int = 0
    mean: float = 0.0
    square: float = 0.0
    error_square: float = 0.0
    counted: int = 0
    _recent_square: float = 0.0
    _recent_error_square: float = 0.0

    def relative(self, exposure: float) -> float | None:
        """An absolute exposure in units of the mean; None (the riskiest) if not finite or while too little is known."""
        if self.seen < LEAST or not math.isfinite(exposure):
            return None
        if self.mean <= 0.0:
            return None if exposure > 0.0 else 0.0
        return exposure / self.mean

    def see(self, exposure: float) -> None:
        """Count an absolute exposure in."""
        if math.isfinite(exposure):
            self.seen += 1
            self.mean += (exposure - self.mean) / min(self.seen, WINDOW)

    def count(self, exposure: float, error: float, *, sign: int = 1) -> None:
        """Count a micro-batch's error in, or (`sign=-1`) out again.

        Args:
            exposure: of the micro-batch, always in the same unit.
            error: the relative one of its plan entry, 0 if what was compressed was rebuilt exactly.
            sign: 1 or -1.
        """
        if math.isfinite(exposure):
            square, error_square = sign * exposure**2, sign * (exposure * error) ** 2
            self.counted += sign
            self.square += square
            self.error_square += error_square
            fading = 1 - 1 / WINDOW if sign > 0 else 1.0
            self._recent_square = fading * self._recent_square + square
            self._recent_error_square = fading * self._recent_error_square + error_square

    def errs_more_than(self, limit: float) -> bool:
        """Whether the error expected of the latest micro-batches is above a limit."""
        return self._recent_error_square > limit**2 * (1 + SLACK) * self._recent_square

    @property
    def expected_error(self) -> float:
        """The relative gradient error expected of the steps so far: `sqrt(sum e^2 error^2 / sum e^2)`."""
        return math.sqrt(max(self.error_square, 0.0) / self.square) if self.square > 0 else 0.0
