"""How far results may be from what they should be: every tolerance of the tests, each with its reason."""

from __future__ import annotations

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
