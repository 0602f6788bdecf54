"""The formulas of `fp8` as Triton kernels. Codes are made by integers: older devices have no instruction for them."""

from __future__ import annotations

import torch
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
    scale_for,
    widened,
)

GROUP = 128
RAW_GROUP = 16


@triton.jit
def _to_fp8(values):
    """The 8 bits of |values| <= 464, as int32; NaN becomes NaN. Nearest, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # below 2^-6 the steps are 2^-9: the last bit of numbers near 2^14
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < (121 << 23), small, normal)
    return sign | tl.where(bits > 0x7F800000, 0x7F, code)


@triton.jit
def _from_fp8(codes):
    """The numbers of 8-bit codes, given as int32."""
    code = codes & 0x7F
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    values = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    values = tl.where(code == 0x7F, float("nan"), values)
    # the sign goes in as a bit: for Triton 3.7, minus zero is 0 - 0
    return (values.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_scaled(x, codes, scales, count, rows: tl.constexpr, group: tl.constexpr):
    row, at = places(group, rows)
    wide = widened(tl.load(x + at, mask=(row < count)[:, None], other=0.0))
    scale = scale_for(tl.max(magnitude_bits(wide), 1), 1.0 / 448)
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    code = _to_fp8(wide * tl.div_rn(1.0, scale)[:, None])
    tl.store(codes + at, code.to(tl.uint8), mask=(row < count)[:, None])


@triton.jit
def _decode_scaled(out, codes, scales, count, rows: tl.constexpr, group: tl.constexpr, end: tl.constexpr):
    row, at = places(group, rows)
    code = tl.load(codes + at, mask=(row < count)[:, None], other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)
    values = bounded(_from_fp8(code) * scale[:, None], end)
    tl.store(out + at, narrowed(values, out.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def _encode_raw(x, codes, count, rows: tl.constexpr, group: tl.constexpr):
    row, at = places(group, rows)
    wide = widened(tl.load(x + at, mask=(row < count)[:, None], other=0.0))
    finite = magnitude_bits(wide) < 0x7F800000
    code = _to_fp8(tl.where(finite, bounded(wide, 448.0), float("nan")))
    tl.store(codes + at, code.to(tl.uint8), mask=(row < count)[:, None])


@triton.jit
def _decode_raw(out, codes, count, rows: tl.constexpr, group: tl.constexpr):
    row, at = places(group, rows)
    code = tl.load(codes + at, mask=(row < count)[:, None], other=0).to(tl.int32)
    tl.store(out + at, narrowed(_from_fp8(code), out.dtype.element_ty), mask=(row < count)[:, None])


def encode_scaled(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `fp8.encode_scaled`."""
    launch(_encode_scaled, GROUP, groups, codes.view(torch.uint8), scales, group=GROUP)


def decode_scaled(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `fp8.decode_scaled`."""
    launch(_decode_scaled, GROUP, out, codes.view(torch.uint8), scales, group=GROUP, end=end_of(out))


def encode_raw(groups: Tensor, codes: Tensor) -> None:
    """See `fp8.encode_raw`."""
    launch(_encode_raw, RAW_GROUP, groups, codes.view(torch.uint8), group=RAW_GROUP)


def decode_raw(out: Tensor, codes: Tensor) -> None:
    """See `fp8.decode_raw`."""
    launch(_decode_raw, RAW_GROUP, out, codes.view(torch.uint8), group=RAW_GROUP)
