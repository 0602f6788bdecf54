"""The risk of a plan: what its compressed values add to the squared error of a step's gradient, and what that costs.

Errors of different values are independent, so their squares add; how well that holds, the held-out mixes of a profile
say. A `Price` turns risk into seconds; at the price 0 only seconds count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hilore_plan.planner.block_view import ClassView, Form
from hilore_plan.planner.patterns import Column
from hilore_plan.planner.timeline import View
from hilore_plan.schema.plan import Action, codec_of

Rho = Mapping[tuple[int, Action], float]


@dataclass(frozen=True)
class Price:
    """Seconds per unit of squared relative error, for the blocks of a view."""

    view: View
    price: float = 0.0

    def risk(self, place: int, column: Column) -> float:
        """The squared error that a column causes in the block at a place."""
        rho = self.view.rho[place]
        return sum(rho[code] for code in column.codes)

    def seconds(self, place: int, column: Column) -> float:
        """What a column costs in the block at a place, its risk included."""
        if not column.codes or not self.price:
            return column.cost.seconds
        return column.cost.seconds + self.price * self.risk(place, column)

    def total(self, columns: Sequence[Column]) -> float:
        """What a whole plan costs."""
        return sum(self.seconds(place, column) for place, column in enumerate(columns))


def total_risk(view: View, columns: Sequence[Column]) -> float:
    """The squared error of a plan, one column per block."""
    price = Price(view)
    return sum(price.risk(place, column) for place, column in enumerate(columns))


def compressed_share(view: View, columns: Sequence[Column]) -> float:
    """The part of the bytes kept that a codec holds, both counted as they were before they were kept."""
    kept = coded = 0
    for index, column in zip(view.class_of, columns, strict=True):
        cls = view.classes[index]
        for unit, action in zip(cls.units, column.pattern, strict=True):
            size = 0 if action == "recompute" or unit in cls.free else cls.value_bytes[unit]
            kept += size
            coded += size if codec_of(action) is not None else 0
    return coded / kept if kept else 0.0


def exact_view(view: View) -> View:
    """The view without any codec."""
    plain = _with_forms(view, lambda _, __, form: codec_of(form.action) is None)
    return replace(plain, rho=tuple({} for _ in view.blocks))


def usable_view(view: View) -> View:
    """The view with the codecs that were calibrated and that nothing else beats in bytes, time and risk at once."""
    rhos: list[list[Rho]] = [[] for _ in view.classes]
    for index, rho in zip(view.class_of, view.rho, strict=True):
        rhos[index].append(rho)

    def useful(index: int, value: int, form: Form) -> bool:
        return _is_useful(view.classes[index], value, form, rhos[index])

    return _with_forms(view, useful)


class _Keep(Protocol):
    """Whether a form of a value of a class stays."""

    def __call__(self, index: int, value: int, form: Form, /) -> bool: ...


def _with_forms(view: View, keep: _Keep) -> View:
    classes = [
        replace(
            cls,
            forms=tuple(
                tuple(form for form in forms if keep(index, value, form)) for value, forms in enumerate(cls.forms)
            ),
        )
        for index, cls in enumerate(view.classes)
    ]
    return replace(view, classes=tuple(classes))


def _is_useful(cls: ClassView, value: int, form: Form, rhos: Sequence[Rho]) -> bool:
    if codec_of(form.action) is None:
        return True
    key = value, form.action
    if form.bytes >= cls.value_bytes[value] or any(key not in rho for rho in rhos):
        return False
    return not any(_beats(other, form, value, rhos) for other in cls.forms[value] if other is not form)


def _beats(other: Form, form: Form, value: int, rhos: Sequence[Rho]) -> bool:
    """Whether the other form is nowhere worse, and somewhere better or, being equal, the first by name."""
    if codec_of(other.action) is not None and any((value, other.action) not in rho for rho in rhos):
        return False
    pairs = [(other.bytes, form.bytes), (other.seconds, form.seconds)]
    pairs += [(rho.get((value, other.action), 0.0), rho.get((value, form.action), 0.0)) for rho in rhos]
    if any(theirs > ours for theirs, ours in pairs):
        return False
    return any(theirs < ours for theirs, ours in pairs) or other.action < form.action
