"""The shape of the grouped formats: codes, and a few values per group; and the arithmetic that they share.

A flat tensor is cut into groups of equal length; the last one is filled up with zeros. The formulas are functions on
whole groups that write into memory given to them, in plain torch: they are the reference, what `fused` compiles,
and what the Triton kernels are tested against.

**Words**: codes of less than 32 bits are packed into int32, one code from each of as many equal *runs* of the group:
word k has element k of every run, the first run in its lowest bits. So all memory is read and written in whole vectors,
and a run at a time. *Measured*: int8 of 7.9 M float32 comes back in 1.8 ms on two threads, where codes of a byte each,
which the compiler loads eight at a time, took 6.0 ms; copying as many float32 takes 1.7 ms. A formula that decodes is
given the runs of its output one by one, because compiled code writes to parts of a tensor by way of a copy of it all.

**Scales** are bfloat16: half the bytes of float32 at its range, where float16 would overflow beyond 127 * 65504.
Rounding a scale to nearest moves it by at most u = 2^-8 of itself, so that the largest code of L levels becomes at most
L (1 + u) < L + 1/2 while L < 128: it still rounds to L, and no code needs clamping. Scales are never below 2^-126, the
smallest normal number, so that their inverse is finite: elements below 2^-127 come back as zero.

**Non-finite** elements spoil their group: its scale is NaN, and all of it decodes to NaN. Nothing that was not
finite comes back finite; other groups do not notice.

**Overflow**: a scale rounded up can carry the largest finite numbers past the dtype's end. `bounded` keeps them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        codes: the dtype of what codes are held in.
        runs: how many codes one of these has; 1: one each.
        sides: dtypes of what each group has beside its codes.
        encode: `(groups, codes, *sides) -> None`, from `[n, group]` of a float dtype into codes `[n, group / runs]` and
            sides `[n]`.
        decode: `(*runs, codes, *sides) -> None`, back into the runs, `[n, group / runs]` each.
    """

    name: str
    group: int
    codes: torch.dtype
    runs: int
    sides: tuple[torch.dtype, ...]
    encode: Callable[..., None]
    decode: Callable[..., None]

    @property
    def width(self) -> int:
        """How many of `codes` a group takes."""
        return self.group // self.runs

    def count(self, elements: int) -> int:
        """Groups that so many elements take."""
        return -(-elements // self.group)

    @property
    def group_bytes(self) -> int:
        """Bytes of one encoded group."""
        return self.width * self.codes.itemsize + sum(dtype.itemsize for dtype in self.sides)

    def allocate(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for the parts: codes `[n, width]` and each side `[n]`."""
        count = self.count(elements)
        codes = torch.empty((count, self.width), dtype=self.codes, device=device)
        return (codes, *(torch.empty(count, dtype=dtype, device=device) for dtype in self.sides))

    def runs_of(self, groups: Tensor) -> tuple[Tensor, ...]:
        """Views of the runs of groups `[n, group]`."""
        return groups.view(-1, self.runs, self.width).unbind(1)


def run_of(groups: Tensor, number: int, runs: int) -> Tensor:
    """One of `runs` runs of groups `[n, group]`, in float32: `[n, group / runs]`."""
    return groups.view(-1, runs, groups.shape[1] // runs)[:, number].float()


def packed(codes: Sequence[Tensor]) -> Tensor:
    """Words of one code from each run, of which int32 tensors are given; 32 / runs bits of each are kept."""
    bits = 32 // len(codes)
    word = codes[0] & ((1 << bits) - 1)
    for number, code in enumerate(codes[1:], 1):
        word = word | ((code & ((1 << bits) - 1)) << (bits * number))
    return word


def unpacked(words: Tensor, number: int, runs: int) -> Tensor:
    """The codes of one run, int32, their highest bit being the sign."""
    bits = 32 // runs
    return (words << (32 - bits * (number + 1))) >> (32 - bits)


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
