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

WIDTH = 32  # words of a group of 128


@triton.jit
def _word(x, first, inside, inverse, zero, run: tl.constexpr, width: tl.constexpr):
    """The codes of one run, in their place within words."""
    wide = widened(tl.load(x + first + run * width, mask=inside, other=0.0))
    return ((round_to_int(wide * inverse) + zero) & 0xFF) << (8 * run)


@triton.jit
def _decode_run(out, first, inside, words, scale, zero, run: tl.constexpr, width: tl.constexpr, end: tl.constexpr):
    code = (words << (24 - 8 * run)) >> 24
    values = bounded((code - zero).to(tl.float32) * scale, end)
    tl.store(out + first + run * width, narrowed(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _encode_symmetric(x, codes, scales, count, rows: tl.constexpr, width: tl.constexpr):
    row, at = places(width, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * (3 * width)  # a group of x has four runs
    largest = tl.zeros([rows], dtype=tl.int32)
    for run in tl.static_range(4):
        wide = widened(tl.load(x + first + run * width, mask=inside, other=0.0))
        largest = tl.maximum(largest, tl.max(magnitude_bits(wide), 1))
    scale = scale_for(largest, 1.0 / 127)
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    inverse = tl.div_rn(1.0, scale)[:, None]
    word = tl.zeros([rows, width], dtype=tl.int32)
    for run in tl.static_range(4):
        word = word | _word(x, first, inside, inverse, 0, run, width)
    tl.store(codes + at, word, mask=inside)


@triton.jit
def _decode_symmetric(out, codes, scales, count, rows: tl.constexpr, width: tl.constexpr, end: tl.constexpr):
    row, at = places(width, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * (3 * width)
    words = tl.load(codes + at, mask=inside, other=0)
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)[:, None]
    for run in tl.static_range(4):
        _decode_run(out, first, inside, words, scale, 0, run, width, end)


@triton.jit
def _encode_asymmetric(x, codes, scales, zeros, count, rows: tl.constexpr, width: tl.constexpr):
    row, at = places(width, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * (3 * width)
    largest = tl.zeros([rows], dtype=tl.int32)
    low, high = tl.zeros([rows], dtype=tl.float32), tl.zeros([rows], dtype=tl.float32)
    for run in tl.static_range(4):
        wide = widened(tl.load(x + first + run * width, mask=inside, other=0.0))
        largest = tl.maximum(largest, tl.max(magnitude_bits(wide), 1))
        low, high = tl.minimum(low, tl.min(wide, 1)), tl.maximum(high, tl.max(wide, 1))
    bits = tl.where(largest < 0x7F800000, (high * 0.5 - low * 0.5).to(tl.int32, bitcast=True), 0x7FC00000)
    scale = scale_for(bits, 1.0 / 126.5)
    inverse = tl.div_rn(1.0, scale)
    zero = round_to_int(-low * inverse)
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    tl.store(zeros + row, zero.to(tl.uint8), mask=row < count)
    word = tl.zeros([rows, width], dtype=tl.int32)
    for run in tl.static_range(4):
        word = word | _word(x, first, inside, inverse[:, None], zero[:, None] - 128, run, width)
    tl.store(codes + at, word, mask=inside)


@triton.jit
def _decode_asymmetric(out, codes, scales, zeros, count, rows: tl.constexpr, width: tl.constexpr, end: tl.constexpr):
    row, at = places(width, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * (3 * width)
    words = tl.load(codes + at, mask=inside, other=0)
    zero = tl.load(zeros + row, mask=row < count, other=0).to(tl.int32)[:, None] - 128
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)[:, None]
    for run in tl.static_range(4):
        _decode_run(out, first, inside, words, scale, zero, run, width, end)


def encode_symmetric(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `int8.encode_symmetric`."""
    launch(_encode_symmetric, WIDTH, groups, codes, scales, width=WIDTH)


def decode_symmetric(*tensors: Tensor) -> None:
    """See `int8.decode_symmetric`."""
    out, *_, codes, scales = tensors  # the first run begins where the groups do
    launch(_decode_symmetric, WIDTH, out, codes, scales, width=WIDTH, end=end_of(out))


def encode_asymmetric(groups: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """See `int8.encode_asymmetric`."""
    launch(_encode_asymmetric, WIDTH, groups, codes, scales, zeros, width=WIDTH)


def decode_asymmetric(*tensors: Tensor) -> None:
    """See `int8.decode_asymmetric`."""
    out, *_, codes, scales, zeros = tensors
    launch(_decode_asymmetric, WIDTH, out, codes, scales, zeros, width=WIDTH, end=end_of(out))
