"""What a second of recomputation costs within a step: measured, and kept within what makes sense."""

from __future__ import annotations

import warnings

SANE_SCALE = (0.5, 3.0)


class NoisyMeasurementWarning(UserWarning):
    """A measured time that makes no sense beside the others; a sane bound was taken instead."""


def bounded(scale: float) -> float:
    """The scale where it is sane, else the nearest bound; 1 where checkpointing seems to cost nothing at all."""
    low, high = SANE_SCALE
    if low <= scale <= high:
        return scale
    taken = 1.0 if scale <= 0 else min(max(scale, low), high)
    warnings.warn(
        f"checkpointing adds {scale:.2f} times the seconds of the ops that it runs again; "
        f"taken as {taken:.1f}: step times are noisy, or the model is too small to measure",
        NoisyMeasurementWarning,
        stacklevel=3,
    )
    return taken
