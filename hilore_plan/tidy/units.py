"""Rows about units: what a plan does with each value of each block, or what a profile says could be done with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.schema.plan import Action, Entry, Group, Plan, codec_of
from hilore_plan.schema.profile import Profile


class UnitRow(NamedTuple):
    """One value of one block under one action; `Tables.units` says what the fields are."""

    entry: int
    block: int
    class_name: str
    unit: str
    decided: bool
    action: str
    codec: str | None
    kept_bytes: int | None
    whole_bytes: int | None
    seconds: float | None
    rho: float | None


class _Cost(NamedTuple):
    """What an action on a value of a class costs, in every block of that class."""

    value: int
    decided: bool
    action: Action
    kept_bytes: int
    whole_bytes: int
    seconds: float


def plan_units(plan: Plan, profile: Profile | None = None) -> list[UnitRow]:
    """What every entry of a plan does with each unit; with its profile, also what that costs.

    With the profile, values that no plan decides on are there as well where they cost something: those that autograd
    keeps in any case, and those between units that recovery makes on its way. So the bytes of an entry add up to what
    the timeline has as kept at its head, and the seconds to its `recompute_seconds`.
    """
    entries = enumerate(plan.entries)
    return [row for number, entry in entries for row in entry_units(entry, profile, number=number)]


def entry_units(entry: Entry, profile: Profile | None = None, *, number: int = 0) -> list[UnitRow]:
    """The rows of one entry, which is the plan's entry of that number."""
    if profile is None:
        return sorted(_named(number, entry), key=lambda row: row.block)
    view = view_at(profile, entry.tokens_up_to, entry.gradients)
    return sorted(_weighed(number, entry, view), key=lambda row: row.block)


def profile_units(profile: Profile) -> list[UnitRow]:
    """Every action that a plan may choose for each unit, at every point, as if it were the block's only one."""
    return [
        row for number, point in enumerate(profile.points) for row in _choices(number, view_at(profile, point.tokens))
    ]


def _named(number: int, entry: Entry) -> Iterator[UnitRow]:
    for group in entry.groups:
        for block in group.blocks:
            for unit, action in group.actions.items():
                yield UnitRow(number, block, group.class_name, unit, True, *_split(action), *(None,) * 4)


def _weighed(number: int, entry: Entry, view: View) -> Iterator[UnitRow]:
    positions = {block: position for position, block in enumerate(view.blocks)}
    for group in entry.groups:
        costs = _group_costs(view, view.class_at(positions[group.blocks[0]]), group) if group.blocks else []
        for block in group.blocks:
            for cost in costs:
                yield _row(number, view, positions[block], cost)


def _choices(number: int, view: View) -> Iterator[UnitRow]:
    costs = {index: list(_class_choices(view, cls)) for index, cls in enumerate(view.classes)}
    for position, index in enumerate(view.class_of):
        for cost in costs[index]:
            yield _row(number, view, position, cost)


def _row(number: int, view: View, position: int, cost: _Cost) -> UnitRow:
    cls = view.class_at(position)
    rho = 0.0 if codec_of(cost.action) is None else view.rho[position].get((cost.value, cost.action))
    return UnitRow(
        number,
        view.blocks[position],
        cls.name,
        cls.names[cost.value],
        cost.decided,
        *_split(cost.action),
        cost.kept_bytes,
        cost.whole_bytes,
        cost.seconds,
        rho,
    )


def _split(action: Action) -> tuple[str, str | None]:
    """`compress:int8` as its two words; the other actions have one."""
    codec = codec_of(action)
    return action if codec is None else "compress", codec


def _group_costs(view: View, cls: ClassView, group: Group) -> list[_Cost]:
    numbers = {cls.names[unit]: unit for unit in cls.units}
    actions: dict[int, Action] = dict.fromkeys(sorted(cls.forced), "store")
    actions |= {numbers[unit]: action for unit, action in group.actions.items()}
    again = _recompute_seconds(view, cls, {value for value, action in actions.items() if action != "recompute"})
    others = sorted((actions.keys() | again.keys()) - set(cls.units))
    return [
        _cost(view, cls, value, actions.get(value, "recompute"), again.get(value, 0.0))
        for value in (*cls.units, *others)
    ]


def _class_choices(view: View, cls: ClassView) -> Iterator[_Cost]:
    for unit in cls.units:
        maker = cls.makers[unit]
        alone = 0.0 if maker is None else view.micro_batches * view.recompute_scale * cls.ops[maker].seconds
        for action in ("store", *(form.action for form in cls.forms[unit])):
            yield _cost(view, cls, unit, action, 0.0)
        if unit not in cls.forced:
            yield _cost(view, cls, unit, "recompute", alone)


def _cost(view: View, cls: ClassView, value: int, action: Action, recompute_seconds: float) -> _Cost:
    form = cls.form(value, action)
    whole = cls.value_bytes[value]
    kept = whole if form is None else form.bytes
    free = value in cls.free  # alive whatever the plan does: neither storing nor dropping it changes a byte
    return _Cost(
        value=value,
        decided=value in cls.units,
        action=action,
        kept_bytes=0 if free or action == "recompute" else kept,
        whole_bytes=0 if free else whole,
        seconds=recompute_seconds + (0.0 if form is None else view.micro_batches * form.seconds),
    )


def _recompute_seconds(view: View, cls: ClassView, kept: set[int]) -> Mapping[int, float]:
    """Seconds of a step by value: each op that runs again is charged to the first of its outputs that was not kept.

    Units go before other values: what a person can decide on should carry the cost.
    """
    charged: dict[int, float] = {}
    for op in sorted(_again(cls, kept)):
        missing = [value for value in cls.ops[op].outputs if value not in kept and value not in cls.free]
        value = min(missing, key=lambda output: (output not in cls.units, output))
        charged[value] = view.micro_batches * view.recompute_scale * cls.ops[op].seconds
    return charged


def _again(cls: ClassView, kept: set[int]) -> set[int]:
    """The ops that have to run again so that every slot is there."""
    again: set[int] = set()
    wanted = [value for value, slots in enumerate(cls.slots) if slots]
    while wanted:
        value = wanted.pop()
        maker = cls.makers[value]
        if value in kept or value in cls.free or maker is None or maker in again:
            continue
        again.add(maker)
        wanted.extend(cls.ops[maker].inputs)
    return again
