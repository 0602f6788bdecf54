"""The formulas of `int8` as Triton kernels."""

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

GROUP = 128


@triton.jit
def _encode_symmetric(x, codes, scales, count, rows: tl.constexpr, group: tl.constexpr):
    row, at = places(group, rows)
    wide = widened(tl.load(x + at, mask=(row < count)[:, None], other=0.0))
    scale = scale_for(tl.max(magnitude_bits(wide), 1), 1.0 / 127)
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    code = round_to_int(wide * tl.div_rn(1.0, scale)[:, None])
    tl.store(codes + at, code.to(tl.int8), mask=(row < count)[:, None])


@triton.jit
def _decode_symmetric(out, codes, scales, count, rows: tl.constexpr, group: tl.constexpr, end: tl.constexpr):
    row, at = places(group, rows)
    code = tl.load(codes + at, mask=(row < count)[:, None], other=0).to(tl.float32)
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)
    values = bounded(code * scale[:, None], end)
    tl.store(out + at, narrowed(values, out.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def _encode_asymmetric(x, codes, scales, zeros, count, rows: tl.constexpr, group: tl.constexpr):
    row, at = places(group, rows)
    wide = widened(tl.load(x + at, mask=(row < count)[:, None], other=0.0))
    finite = tl.max(magnitude_bits(wide), 1) < 0x7F800000
    low, high = tl.minimum(tl.min(wide, 1), 0.0), tl.maximum(tl.max(wide, 1), 0.0)
    bits = tl.where(finite, (high * 0.5 - low * 0.5).to(tl.int32, bitcast=True), 0x7FC00000)
    scale = scale_for(bits, 1.0 / 126.5)
    inverse = tl.div_rn(1.0, scale)
    zero = round_to_int(-low * inverse)
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    tl.store(zeros + row, zero.to(tl.uint8), mask=row < count)
    code = round_to_int(wide * inverse[:, None]) + zero[:, None]
    tl.store(codes + at, code.to(tl.uint8), mask=(row < count)[:, None])


@triton.jit
def _decode_asymmetric(out, codes, scales, zeros, count, rows: tl.constexpr, group: tl.constexpr, end: tl.constexpr):
    row, at = places(group, rows)
    code = tl.load(codes + at, mask=(row < count)[:, None], other=0).to(tl.int32)
    zero = tl.load(zeros + row, mask=row < count, other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)
    values = bounded((code - zero[:, None]).to(tl.float32) * scale[:, None], end)
    tl.store(out + at, narrowed(values, out.dtype.element_ty), mask=(row < count)[:, None])


def encode_symmetric(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `int8.encode_symmetric`."""
    launch(_encode_symmetric, GROUP, groups, codes, scales, group=GROUP)


def decode_symmetric(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `int8.decode_symmetric`."""
    launch(_decode_symmetric, GROUP, out, codes, scales, group=GROUP, end=end_of(out))


def encode_asymmetric(groups: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """See `int8.encode_asymmetric`."""
    launch(_encode_asymmetric, GROUP, groups, codes, scales, zeros, group=GROUP)


def decode_asymmetric(out: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """See `int8.decode_asymmetric`."""
    launch(_decode_asymmetric, GROUP, out, codes, scales, zeros, group=GROUP, end=end_of(out))
