"""What the Triton kernels share: the arithmetic of `format`, operation by operation, and how they are launched.

Kernels take whole groups and write into memory given to them, as the formulas do, and under the formulas' names.
Offsets have 64 bits. There is no fused multiply-add, which would round once where the formulas round twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # per program: enough for wide loads on 4 warps


@triton.jit
def scale_for(largest_bits, inverse_levels: tl.constexpr):
    """`format.scales_for`, given the bits of the largest magnitude, whose order is that of the numbers, NaN last."""
    scale = tl.maximum(largest_bits.to(tl.float32, bitcast=True) * inverse_levels, 1.1754943508222875e-38)
    bits = scale.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    bits = tl.where(largest_bits < 0x7F800000, bits, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(values):
    """The bits of |values|, float32, as int32."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_to_int(values):
    """To nearest, ties to even, for |values| < 2^22: the sum with 1.5 * 2^23 has no bits left for fractions."""
    return (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def bounded(values, end: tl.constexpr):
    """`format.bounded`; comparisons with NaN are false, so that NaN stays."""
    values = tl.where(values > end, end, values)
    return tl.where(values < -end, -end, values)


@triton.jit
def widened(values):
    """As float32. From bfloat16 through the bits: Triton's interpreter loses its subnormals (3.9)."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def narrowed(values, dtype: tl.constexpr):
    """float32 as `dtype`. To bfloat16 through the bits, rounded: Triton's interpreter cuts them off (3.9)."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        narrow = half.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = values.to(dtype)
    return narrow


@triton.jit
def places(group: tl.constexpr, rows: tl.constexpr):
    """The numbers of this program's groups, `[rows]`, and the offsets of their elements, `[rows, group]`."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    return row, row[:, None] * group + tl.arange(0, group)[None, :]


def launch(kernel: Any, width: int, /, *tensors: Tensor, **constants: Any) -> None:
    """Run a kernel `(*pointers, count, **constants, rows)` over all groups; `width` elements of a group at a time."""
    count = len(tensors[0])
    rows = ELEMENTS // width
    with torch.cuda.device_of(tensors[0]):
        kernel[(triton.cdiv(count, rows),)](*tensors, count, rows=rows, **constants, enable_fp_fusion=False)


def end_of(out: Tensor) -> float:
    """The largest finite number of the tensor's dtype."""
    return torch.finfo(out.dtype).max
