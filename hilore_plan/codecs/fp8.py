"""`fp8_e4m3`: 8-bit floats (4 bits of exponent, 3 of fraction), a scale per group of 128; `fp8_e4m3_raw`: without.

`fp8_e4m3`: s = max|x| / 448 over the group; q = x / s rounded to nearest, ties to even; x' = q s. Error: at most
2^-4 |x|, or 2^-10 s where |x| < 2^-6 s (the format's subnormals).

`fp8_e4m3_raw`: q = x rounded to the format, what lies beyond its end becomes +-448. It is here to reproduce published
figures, for nothing else: |x| < 2^-10 is lost, and |x| > 448 is cut. What is not finite becomes NaN, one by one.

The format is that of Micikevicius et al., "FP8 Formats for Deep Learning" (2022), section 3: no infinities, one NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_plan.codecs.format import SCALE, Format, bounded, scales_for

GROUP = 128
RAW_GROUP = 16
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


def encode_scaled(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the module."""
    wide = groups.float()
    scale = scales_for(wide.abs().amax(1), LARGEST)
    scales.copy_(scale)
    codes.copy_(wide * scale.reciprocal()[:, None])


def decode_scaled(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the module."""
    out.copy_(bounded(codes.float() * scales.float()[:, None], out.dtype))


def encode_raw(groups: Tensor, codes: Tensor) -> None:
    """See the module."""
    wide = groups.float()
    codes.copy_(torch.where(wide.isfinite(), wide.clamp(-LARGEST, LARGEST), torch.nan))


def decode_raw(out: Tensor, codes: Tensor) -> None:
    """See the module."""
    out.copy_(codes.float())


FP8_E4M3 = Format("fp8_e4m3", GROUP, FP8, 1, (SCALE,), encode_scaled, decode_scaled)
FP8_E4M3_RAW = Format("fp8_e4m3_raw", RAW_GROUP, FP8, 1, (), encode_raw, decode_raw)
