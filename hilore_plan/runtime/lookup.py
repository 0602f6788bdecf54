"""Find the plan entry for a micro-batch: the smallest bucket that holds its tokens and its exposure."""

from __future__ import annotations

from bisect import bisect_left
from math import isnan

from hilore_plan.schema.plan import Entry, Plan

HIGHEST = float("inf")


class Lookup:
    """The entries of a plan, by tokens and then by exposure.

    `find` gives an index into `plan.entries`, or None when the micro-batch has more tokens than the plan knows.
    """

    def __init__(self, plan: Plan) -> None:
        edges: dict[int, list[tuple[float, int]]] = {}
        for index, entry in enumerate(plan.entries):
            edges.setdefault(entry.tokens_up_to, []).append((_upper(entry), index))
        self._tokens = sorted(edges)
        ordered = [sorted(edges[tokens]) for tokens in self._tokens]
        self._exposures = [[upper for upper, _ in bucket] for bucket in ordered]
        self._indices = [[index for _, index in bucket] for bucket in ordered]
        self._uppers = {index: upper for bucket in ordered for upper, index in bucket[:-1]}

    def find(self, tokens: int, exposure: float | None) -> int | None:
        """The entry for `tokens` (padding included) and `exposure` (None or NaN: the highest)."""
        row = bisect_left(self._tokens, tokens)
        if row == len(self._tokens):
            return None
        uppers = self._exposures[row]
        # the last bucket holds every exposure above it: it is the most careful one
        last = len(uppers) - 1
        # NaN (a group without spread in its rewards) is below no edge, and would count as the lowest
        column = last if exposure is None or isnan(exposure) else min(bisect_left(uppers, exposure), last)
        return self._indices[row][column]

    def is_riskier(self, exposure: float | None, entry: int | None) -> bool:
        """Whether `exposure` (None or NaN: the highest) is above the bucket of an entry; nothing is above the last."""
        upper = None if entry is None else self._uppers.get(entry)
        return upper is not None and (exposure is None or not exposure <= upper)  # R11: NaN is above every edge

    def has_riskier(self, entry: int | None) -> bool:
        """Whether there is a bucket of higher exposure than that of an entry, for the same tokens."""
        return entry in self._uppers


def _upper(entry: Entry) -> float:
    return HIGHEST if entry.exposure_up_to is None else entry.exposure_up_to
