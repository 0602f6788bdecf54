"""Blocks with similar risks in groups, so that one pattern need not be looked for in each of them.

With the least risks of a group, its best pattern costs no more than that of any of its blocks: a bound for all of them.
The more alike the risks, the tighter it is. Neighbours in depth are the most alike, and only they are put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hilore_plan.planner.risk import Rho
from hilore_plan.planner.timeline import View

FEW_GROUPS, MANY_GROUPS = 3, 10  # while the price of risk is looked for, and at the end
TINY = 1e-30  # below every risk that counts: a risk of zero is far from one that is not


@dataclass(frozen=True)
class Groups:
    """`of` has the group of each place, `least` the least risks in each group, `class_of` its class."""

    of: tuple[int, ...]
    least: tuple[Rho, ...]
    class_of: tuple[int, ...]


def grouped(view: View, most: int) -> Groups:
    """The blocks of each class in at most `most` groups."""
    of = [0] * len(view.blocks)
    least: list[Rho] = []
    class_of: list[int] = []
    for index in range(len(view.classes)):
        places = [place for place, number in enumerate(view.class_of) if number == index]
        codes = [(value, form.action) for value, forms in enumerate(view.classes[index].forms) for form in forms]
        for members in _clustered(view, places, [code for code in codes if code in view.rho[places[0]]], most):
            for place in members:
                of[place] = len(least)
            least.append(_least([view.rho[place] for place in members]))
            class_of.append(index)
    return Groups(tuple(of), tuple(least), tuple(class_of))


def _clustered(view: View, places: Sequence[int], codes: Sequence[tuple[int, str]], most: int) -> list[tuple[int, ...]]:
    """The places in runs of neighbours; the two runs whose union loses the least are joined again and again."""
    if not codes:
        return [tuple(places)]
    runs: list[tuple[int, ...]] = [(place,) for place in places]
    logs = [[math.log(view.rho[place][code] + TINY) for code in codes] for place in places]
    while len(runs) > 1:
        unions = [list(map(min, left, right)) for left, right in pairwise(logs)]
        losses = [
            len(runs[n]) * (sum(logs[n]) - sum(union)) + len(runs[n + 1]) * (sum(logs[n + 1]) - sum(union))
            for n, union in enumerate(unions)
        ]
        best = min(range(len(losses)), key=losses.__getitem__)
        if len(runs) <= most and losses[best] > 0:  # what is equal is joined in any case
            break
        runs[best : best + 2] = [runs[best] + runs[best + 1]]
        logs[best : best + 2] = [unions[best]]
    return runs


def _least(rhos: Sequence[Rho]) -> Rho:
    return {code: min(rho[code] for rho in rhos) for code in rhos[0] if all(code in rho for rho in rhos)}
