"""Token buckets: at which micro-batch sizes a plan has entries of its own."""

from __future__ import annotations

from hilore_plan.errors import UsageError


def token_edges(largest: int, count: int) -> tuple[int, ...]:
    """The upper edges of `count` equal buckets up to `largest` tokens, ascending; fewer if there are fewer tokens.

    Raises:
        UsageError: if `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"{count} token buckets make no sense", hint="give at least 1; the default is 4")
    return tuple(sorted({-(-largest * edge // count) for edge in range(1, count + 1)}))
