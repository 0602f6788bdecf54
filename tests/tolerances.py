"""How far results may be from what they should be: every tolerance of the tests, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A plan's predicted peak against the measured one, relative. The prediction leaves out what torch's checkpoint keeps
# besides a block's inputs, on a CPU the state of its generator: 5056 bytes a block, in models of a megabyte.
PREDICTED_PEAK = 0.05

# A coefficient in closed form against autograd, both in fp64, relative to the largest of the micro-batch: two orders of
# the same few hundred roundings of 1.1e-16, of which ratios up to e^6 may lose a few digits to cancellation.
COEFFICIENTS = 1e-9


def compressed_gradient(levels: int, units: int) -> float:
    """How far a gradient may be from the exact one with so many units of each block compressed, relative.

    An element is off by a uniform error of one step of `1 / levels` of its group's largest element, so by
    `1 / (levels * sqrt(12))` of it in the root mean square; the largest is at most some 3 times a group's own root mean
    square; and the errors of units, which are independent, add up by their squares.
    """
    return 3.0 * units**0.5 / (levels * 12**0.5)


# Advantages against torch's in fp64, for rewards of at most 5: two orders of a few roundings of 1.1e-16, divided by a
# standard deviation of at least 1e-4.
ADVANTAGES = 1e-10


# A group's scale has 8 bits: rounded to nearest it is at most this much too large.
SCALE_ROUNDING = 2.0**-8

# x / s in fp32 is two roundings of 2^-24 off, of numbers up to 254: as a share of half a step, which is what a code may
# be off, at most 254 * 2^-23 / 0.5 = 2^-14; rounded up for the product in decoding.
CODE_ROUNDING = 2.0**-13


def codec_error(name: str, groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error that a codec may make, element by element.

    Half a step of its group, or half of an 8-bit float's last digit, and the rounding of the result to `dtype`.

    Args:
        name: the codec.
        groups: the numbers, `[n, group]`, float64.
        dtype: of the numbers and the result.
    """
    import torch  # the tolerances of rooms without torch are here as well

    limits = torch.finfo(dtype)
    low, high = groups.amin(1, keepdim=True).clamp_max(0), groups.amax(1, keepdim=True).clamp_min(0)
    largest = torch.maximum(-low, high)
    if name == "cast":
        return torch.zeros_like(groups)
    if name == "fp8_e4m3_raw":
        error = torch.where(groups.abs() <= 464, groups.abs().clamp_max(448) * 2**-4 + 2**-10, groups.abs() - 448)
    elif name == "fp8_e4m3":
        error = groups.abs() * 2**-4 + _step(largest, 448) * 2**-10
    else:
        spans = {"int8": (largest, 127), "int4": (largest, 7), "int8_asym": (high - low, 253)}
        error = (_step(*spans[name]) / 2).expand_as(groups)
    error = error * (1 + CODE_ROUNDING)
    return error + (groups.abs() + error) * limits.eps / 2 + limits.smallest_normal * limits.eps / 2


def _step(span: torch.Tensor, levels: int) -> torch.Tensor:
    """The largest that a group's scale may be; scales are no smaller than the smallest normal bfloat16."""
    return (span / levels * (1 + SCALE_ROUNDING)).clamp_min(2.0**-126)


# The mean square of many uniform errors of a step s is s^2 / 12; over 25,600 of them its own standard deviation is
# sqrt(4/5) / sqrt(25600) = 0.6 %, and five of these are 3 %.
UNIFORM_MEAN_SQUARE = 0.03

# Seconds and errors of a plan's units against those of its entry, relative: the same few hundred numbers, all positive,
# added up in two orders with roundings of 1.1e-16 each.
ADDED_UP = 1e-13
