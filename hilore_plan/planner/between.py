"""Measures at a token count between two measured points: linear, bytes rounded up; below the smallest, its own hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hilore_plan.errors import UsageError
from hilore_plan.schema.profile import Point, Profile


@dataclass(frozen=True)
class Between:
    """Where a token count lies between two measured points."""

    low: Point
    high: Point
    tokens: int

    def count(self, read: Callable[[Point], int]) -> int:
        """An integer measure, rounded up."""
        low, high = read(self.low), read(self.high)
        span = self.high.tokens - self.low.tokens
        if span == 0:
            return low
        # in integers, so that no float rounds a byte away: -(-a // b) is a / b rounded up
        return low - (-(high - low) * (self.tokens - self.low.tokens) // span)

    def number(self, read: Callable[[Point], float]) -> float:
        """A real measure."""
        low, high = read(self.low), read(self.high)
        span = self.high.tokens - self.low.tokens
        return low if span == 0 else low + (high - low) * (self.tokens - self.low.tokens) / span

    def counts(self, read: Callable[[Point], Sequence[int]]) -> tuple[int, ...]:
        """A list of integer measures."""
        return tuple(self.count(lambda point, i=i: read(point)[i]) for i in range(len(read(self.low))))  # type: ignore[misc]

    def numbers(self, read: Callable[[Point], Sequence[float]]) -> tuple[float, ...]:
        """A list of real measures."""
        return tuple(self.number(lambda point, i=i: read(point)[i]) for i in range(len(read(self.low))))  # type: ignore[misc]


def between(profile: Profile, tokens: int) -> Between:
    """Where `tokens` lie among the measured points.

    Raises:
        UsageError: if `tokens` is more than was measured: nothing is known about larger micro-batches.
    """
    measured = [point.tokens for point in profile.points]
    if tokens > measured[-1]:
        raise UsageError(
            f"the profile was measured up to {measured[-1]} tokens per micro-batch; {tokens} are more",
            hint="profile again with a larger --batch, --prompt-tokens or --response-tokens",
        )
    high = bisect_left(measured, tokens)
    low = high if high == 0 or measured[high] == tokens else high - 1
    return Between(profile.points[low], profile.points[high], tokens)
