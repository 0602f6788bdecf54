"""Sums of gradients over micro-batches, of which every seventeenth element is kept: enough to tell their norms.

A step's gradient for each of ten mixes would be ten times the model in fp32. The stride is prime: one that divides a
row's length would see the same columns in every row, and a few columns hold most of what there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STRIDE = 17
# smaller tensors are kept whole
WHOLE = 2**16


class Sketch:
    """A sum of gradients, `[count]` tensors that are added up one by one."""

    def __init__(self, count: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * count
        self._scales = [1.0] * count

    def add(self, gradients: Sequence[torch.Tensor | None], start: int = 0) -> None:
        """Adds gradients to the tensors from number `start` on; None adds nothing."""
        for index, gradient in enumerate(gradients, start):
            if gradient is not None:
                part = _sampled(gradient)
                found = self._sums[index]
                self._sums[index] = part if found is None else found + part
                self._scales[index] = gradient.numel() / max(part.numel(), 1)

    def squared(self) -> float:
        """The squared norm of the sum."""
        return self.squared_distance(Sketch(len(self._sums)))

    def squared_distance(self, other: Sketch) -> float:
        """The squared norm of the difference of two sums."""
        total = 0.0
        for one, two, scale in zip(self._sums, other._sums, map(max, self._scales, other._scales), strict=True):
            difference = two if one is None else one if two is None else one - two
            if difference is not None:
                total += scale * float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
        return total


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    flat = gradient.detach().reshape(-1)
    return flat.clone() if flat.numel() <= WHOLE else flat[::STRIDE].clone()
