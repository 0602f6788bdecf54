"""The formulas of `int4` as Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hilore_plan.codecs.format_triton import (
    bounded,
    end_of,
    launch,
    magnitude_bits,
    narrowed,
    places,
    round_to_int,
    scale_for,
    widened,
)

HALF = 32


@triton.jit
def _encode(x, codes, scales, count, rows: tl.constexpr, half: tl.constexpr):
    row, at = places(half, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * half  # a group of x is two halves long
    low = widened(tl.load(x + first, mask=inside, other=0.0))
    high = widened(tl.load(x + first + half, mask=inside, other=0.0))
    largest = tl.maximum(tl.max(magnitude_bits(low), 1), tl.max(magnitude_bits(high), 1))
    scale = scale_for(largest, 1.0 / 7)
    inverse = tl.div_rn(1.0, scale)[:, None]
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    code = (round_to_int(low * inverse) + 8) | ((round_to_int(high * inverse) + 8) << 4)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)


@triton.jit
def _decode(out, codes, scales, count, rows: tl.constexpr, half: tl.constexpr, end: tl.constexpr):
    row, at = places(half, rows)
    inside = (row < count)[:, None]
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)[:, None]
    low = bounded(((code & 15) - 8).to(tl.float32) * scale, end)
    high = bounded(((code >> 4) - 8).to(tl.float32) * scale, end)
    first = at + row[:, None] * half
    tl.store(out + first, narrowed(low, out.dtype.element_ty), mask=inside)
    tl.store(out + first + half, narrowed(high, out.dtype.element_ty), mask=inside)


def encode(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `int4.encode`."""
    launch(_encode, HALF, groups, codes, scales, half=HALF)


def decode(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `int4.decode`."""
    launch(_decode, HALF, out, codes, scales, half=HALF, end=end_of(out))
