"""How far results may be from what they should be: every tolerance of the tests, each with its reason."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def unbiased(error: torch.Tensor) -> float:
    """How far from 0 the mean of independent errors may be: five times its standard deviation."""
    return 5.0 * float(error.std()) / error.numel() ** 0.5


def uncorrelated(count: int) -> float:
    """How large the correlation of so many pairs of independent errors may be: five times its standard deviation."""
    return 5.0 / count**0.5


def slow_down(first: Sequence[float], last: Sequence[float]) -> float:
    """How much longer the median of the last steps may take than that of the first, of equal work, in CPU seconds.

    Five times the standard deviation of a difference of medians (1.25 that of a mean), and a tenth for what else runs
    on the machine: cores and caches that are shared cost CPU time as well.
    """
    spread = sum(statistics.variance(seconds) / len(seconds) for seconds in (first, last)) ** 0.5
    return 5.0 * 1.25 * spread + 0.1 * statistics.median(first)


# A step's gradient with its rows in other micro-batches, all in fp64, relative to its norm: the same terms in another
# order, with paddings of other widths; each of the few thousand sums of at most a few thousand terms is off by up to
# 1.1e-16 for each of them, in the mean by the root of their number.
OTHER_ORDER = 1e-12

# The same through TRL's trainer, whose log-probs and loss are fp32 whatever the model is: 6e-8 for each of a few
# hundred terms, whose errors add up by their squares.
OTHER_ORDER_FP32 = 2e-6

# How far above the best of all ways the estimated time of a few rows may be. What is missed is a swap of three rows at
# once, of which each pair alone wins nothing: some thousandths of what exposure can win, a tenth of the time.
NEARLY_BEST = 0.01


def solver_bytes(limit_bytes: int) -> int:
    """How many bytes of a limit a plan may leave unused because the solver could not tell them: none below 10^6.

    A solver takes a binary for whole within 1e-6, and what it stands for may be as large as the limit. Where a plan is
    over by that, the planner looks again with at most 16 times as much less room; and so for each of a few binaries.
    """
    return int(limit_bytes * 1e-6) * 16 * 8
