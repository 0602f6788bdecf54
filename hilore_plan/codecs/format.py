"""The shape of the grouped formats: codes, and a few values per group; and the arithmetic that they share.

A flat tensor is cut into groups of equal length; the last one is filled up with zeros. The formulas are functions on
whole groups that write into memory given to them, in plain torch: they are the reference, what `fused` compiles,
and what the Triton kernels are tested against.

**Scales** are bfloat16: half the bytes of float32 at its range, where float16 would overflow beyond 127 * 65504.
Rounding a scale to nearest moves it by at most u = 2^-8 of itself, so that the largest code of L levels becomes at most
L (1 + u) < L + 1/2 while L < 128: it still rounds to L, and no code needs clamping. Scales are never below 2^-126, the
smallest normal number, so that their inverse is finite: elements below 2^-127 come back as zero.

**Non-finite** elements spoil their group: its scale is NaN, and all of it decodes to NaN. Nothing that was not
finite comes back finite; other groups do not notice.

**Overflow**: a scale rounded up can carry the largest finite numbers past the dtype's end. `bounded` keeps them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-126
SCALE = torch.bfloat16


@dataclass(frozen=True)
class Format:
    """A grouped format.

    Args:
        name: as in plans.
        group: elements per group.
        width: bytes of codes per group.
        codes: the codes' dtype.
        sides: dtypes of what each group has beside its codes.
        encode: `(groups, codes, *sides) -> None`, from `[n, group]` of a float dtype into codes `[n, width]` and
            sides `[n]`.
        decode: `(out, codes, *sides) -> None`, back into `[n, group]`.
    """

    name: str
    group: int
    width: int
    codes: torch.dtype
    sides: tuple[torch.dtype, ...]
    encode: Callable[..., None]
    decode: Callable[..., None]

    def count(self, elements: int) -> int:
        """Groups that so many elements take."""
        return -(-elements // self.group)

    @property
    def group_bytes(self) -> int:
        """Bytes of one encoded group."""
        return self.width + sum(dtype.itemsize for dtype in self.sides)

    def allocate(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for the parts: codes `[n, width]` and each side `[n]`."""
        count = self.count(elements)
        codes = torch.empty((count, self.width), dtype=self.codes, device=device)
        return (codes, *(torch.empty(count, dtype=dtype, device=device) for dtype in self.sides))


def scales_for(largest: Tensor, levels: float) -> Tensor:
    """Scales that put a group's largest magnitude on the last level: NaN where it is not finite.

    Args:
        largest: `[n]`, float32.
        levels: the last level.

    Returns:
        `[n]`, float32, each a number of bfloat16.
    """
    scales = rounded_to_bfloat16((largest * (1.0 / levels)).clamp_min(SMALLEST_SCALE))
    return torch.where(largest.isfinite(), scales, torch.nan)


def rounded_to_bfloat16(values: Tensor) -> Tensor:
    """Positive float32 rounded to nearest bfloat16, ties to even, as float32.

    Through the bits: torch's compiler keeps a float32 that is cast to bfloat16 and back as it was, and the codes would
    not be those of the stored scale (seen in torch 2.13).
    """
    bits = values.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def bounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, float32, kept within the finite range of `dtype`; NaN stays."""
    end = torch.finfo(dtype).max
    return values.clamp(-end, end)
