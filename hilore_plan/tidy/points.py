"""Rows about moments: what holds memory at every point of every entry's timeline."""

from __future__ import annotations

from typing import NamedTuple

from hilore_plan.planner.simulate import PointBytes, timeline
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import Profile


class PointRow(NamedTuple):
    """One point of one entry's timeline; `Tables.timeline` says what the fields are."""

    entry: int
    point: str
    position: int
    fixed_bytes: int
    gradients_bytes: int
    kept_bytes: int
    rebuilt_bytes: int
    working_bytes: int
    total_bytes: int
    limit_bytes: int


def plan_points(plan: Plan, profile: Profile) -> list[PointRow]:
    """The timelines of all entries, in the order of time."""
    return [
        PointRow(
            entry=number,
            point=point.name,
            position=position,
            fixed_bytes=point.fixed,
            gradients_bytes=point.gradients,
            kept_bytes=point.kept,
            rebuilt_bytes=point.rebuilt,
            working_bytes=point.working,
            total_bytes=point.total,
            limit_bytes=plan.budget.limit_bytes,
        )
        for number, entry in enumerate(plan.entries)
        for position, point in enumerate(entry_timeline(entry, profile))
    ]


def entry_timeline(entry: Entry, profile: Profile) -> tuple[PointBytes, ...]:
    """The timeline of one entry, played by the simulator at the entry's upper edge."""
    view = view_at(profile, entry.tokens_up_to, entry.gradients)
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    return timeline(view, [actions[block] for block in view.blocks])
