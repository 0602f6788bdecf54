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

WIDTH = 8  # words of a group of 64


@triton.jit
def _encode(x, codes, scales, count, rows: tl.constexpr, width: tl.constexpr):
    row, at = places(width, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * (7 * width)  # a group of x has eight runs
    largest = tl.zeros([rows], dtype=tl.int32)
    for run in tl.static_range(8):
        wide = widened(tl.load(x + first + run * width, mask=inside, other=0.0))
        largest = tl.maximum(largest, tl.max(magnitude_bits(wide), 1))
    scale = scale_for(largest, 1.0 / 7)
    inverse = tl.div_rn(1.0, scale)[:, None]
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < count)
    word = tl.zeros([rows, width], dtype=tl.int32)
    for run in tl.static_range(8):
        wide = widened(tl.load(x + first + run * width, mask=inside, other=0.0))
        word = word | ((round_to_int(wide * inverse) & 0xF) << (4 * run))
    tl.store(codes + at, word, mask=inside)


@triton.jit
def _decode(out, codes, scales, count, rows: tl.constexpr, width: tl.constexpr, end: tl.constexpr):
    row, at = places(width, rows)
    inside = (row < count)[:, None]
    first = at + row[:, None] * (7 * width)
    words = tl.load(codes + at, mask=inside, other=0)
    scale = tl.load(scales + row, mask=row < count, other=0.0).to(tl.float32)[:, None]
    for run in tl.static_range(8):
        code = (words << (28 - 4 * run)) >> 28
        values = bounded(code.to(tl.float32) * scale, end)
        tl.store(out + first + run * width, narrowed(values, out.dtype.element_ty), mask=inside)


def encode(groups: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `int4.encode`."""
    launch(_encode, WIDTH, groups, codes, scales, width=WIDTH)


def decode(*tensors: Tensor) -> None:
    """See `int4.decode`."""
    out, *_, codes, scales = tensors  # the first run begins where the groups do
    launch(_decode, WIDTH, out, codes, scales, width=WIDTH, end=end_of(out))
