"""Find the plan entry for a micro-batch: the smallest bucket that holds its tokens and its exposure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import isnan

from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.record import GradientState

HIGHEST = float("inf")


class Lookup:
    """The entries of a plan, by gradients, then by tokens, then by exposure.

    `find` gives an index into `plan.entries`, or None when the micro-batch has more tokens than the plan knows.
    """

    def __init__(self, plan: Plan) -> None:
        entries = list(enumerate(plan.entries))
        self._live = _Sizes((index, entry) for index, entry in entries if entry.gradients == "live")
        self._none = _Sizes((index, entry) for index, entry in entries if entry.gradients == "none")
        self._uppers = {**self._live.uppers(), **self._none.uppers()}

    def find(self, tokens: int, exposure: float | None, gradients: GradientState = "live") -> int | None:
        """The entry for `tokens` (padding included), `exposure` (None or NaN: the highest), and gradients."""
        found = self._none.find(tokens, exposure) if gradients == "none" else None
        return self._live.find(tokens, exposure) if found is None else found

    def is_riskier(self, exposure: float | None, entry: int | None) -> bool:
        """Whether `exposure` (None or NaN: the highest) is above the bucket of an entry; nothing is above the last."""
        upper = None if entry is None else self._uppers.get(entry)
        return upper is not None and (exposure is None or not exposure <= upper)  # R11: NaN is above every edge

    def has_riskier(self, entry: int | None) -> bool:
        """Whether there is a bucket of higher exposure than that of an entry, for the same tokens."""
        return entry in self._uppers


class _Sizes:
    """Numbered entries by tokens and then by exposure."""

    def __init__(self, entries: Iterable[tuple[int, Entry]]) -> None:
        edges: dict[int, list[tuple[float, int]]] = {}
        for index, entry in entries:
            edges.setdefault(entry.tokens_up_to, []).append((_upper(entry), index))
        self._tokens = sorted(edges)
        ordered = [sorted(edges[tokens]) for tokens in self._tokens]
        self._exposures = [[upper for upper, _ in bucket] for bucket in ordered]
        self._indices = [[index for _, index in bucket] for bucket in ordered]

    def find(self, tokens: int, exposure: float | None) -> int | None:
        row = bisect_left(self._tokens, tokens)
        if row == len(self._tokens):
            return None
        uppers = self._exposures[row]
        # the last bucket holds every exposure above it: it is the most careful one
        last = len(uppers) - 1
        # NaN (a group without spread in its rewards) is below no edge, and would count as the lowest
        column = last if exposure is None or isnan(exposure) else min(bisect_left(uppers, exposure), last)
        return self._indices[row][column]

    def uppers(self) -> dict[int, float]:
        """The upper edge of every bucket that has a higher one for the same tokens."""
        rows = zip(self._exposures, self._indices, strict=True)
        pairs = (pair for uppers, indices in rows for pair in zip(uppers[:-1], indices[:-1], strict=True))
        return {index: upper for upper, index in pairs}


def _upper(entry: Entry) -> float:
    return HIGHEST if entry.exposure_up_to is None else entry.exposure_up_to
