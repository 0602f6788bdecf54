"""Every pattern of a small block, for tests that compare the planner with trying all of them."""

from __future__ import annotations

import itertools

from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.patterns import Column, Pattern, column
from hilore_plan.planner.timeline import View


def every_column(view: View, index: int) -> list[Column]:
    """The patterns of class number `index` that the simulator takes."""
    cls = view.classes[index]
    choices = [("store", "recompute", *(form.action for form in cls.forms[unit])) for unit in cls.units]
    columns = [try_column(view, index, pattern) for pattern in itertools.product(*choices)]
    return [found for found in columns if found is not None]


def try_column(view: View, index: int, pattern: Pattern) -> Column | None:
    """The column of a pattern; None if the simulator refuses it."""
    try:
        return column(view, index, pattern)
    except UnrecoverableError:
        return None
