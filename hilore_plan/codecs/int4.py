"""`int4`: 4 bits per element, groups of 64, a scale per group.

s = max|x| / 7 over the group; q = round(x / s) in -7...7; x' = q s. Error: |x' - x| <= s / 2. Rounding is to nearest,
ties to even. Byte j of a group holds q[j] + 8 in its low and q[j + 32] + 8 in its high half: halves of a group, not
neighbours, so that both are read and written as runs of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_plan.codecs.format import SCALE, Format, bounded, scales_for

GROUP = 64
HALF = GROUP // 2
LEVELS = 7


def encode(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the module."""
    wide = groups.float()
    scale = scales_for(wide.abs().amax(1), LEVELS)
    scales.copy_(scale)
    nibbles = (wide * scale.reciprocal()[:, None]).round().to(torch.int32) + 8
    codes.copy_(nibbles[:, :HALF] | (nibbles[:, HALF:] << 4))


def decode(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the module."""
    wide, scale = codes.to(torch.int32), scales.float()[:, None]
    out[:, :HALF].copy_(bounded(((wide & 15) - 8).float() * scale, out.dtype))
    out[:, HALF:].copy_(bounded(((wide >> 4) - 8).float() * scale, out.dtype))


INT4 = Format("int4", GROUP, HALF, torch.uint8, (SCALE,), encode, decode)
