"""`int4`: 4 bits per element, groups of 64, a scale per group.

s = max|x| / 7 over the group; q = round(x / s) in -7...7; x' = q s. Error: |x' - x| <= s / 2. Rounding is to nearest,
ties to even. Codes are eight in a word (see `format`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_plan.codecs.format import SCALE, Format, bounded, packed, run_of, scales_for, unpacked

GROUP = 64
RUNS = 8
LEVELS = 7


def encode(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the module."""
    scale = scales_for(groups.float().abs().amax(1), LEVELS)
    inverse = scale.reciprocal()[:, None]
    scales.copy_(scale)
    runs = [run_of(groups, number, RUNS) for number in range(RUNS)]
    codes.copy_(packed([(run * inverse).round().to(torch.int32) for run in runs]))


def decode(*tensors: Tensor) -> None:
    """See the module."""
    *runs, codes, scales = tensors
    scale = scales.float()[:, None]
    for number, run in enumerate(runs):
        run.copy_(bounded(unpacked(codes, number, RUNS).float() * scale, run.dtype))


INT4 = Format("int4", GROUP, torch.int32, RUNS, (SCALE,), encode, decode)
