"""Whether a profile is the one that a plan was made from."""

from __future__ import annotations

from collections.abc import Iterator

from hilore_plan.errors import UsageError
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Profile


def check_fit(plan: Plan, profile: Profile) -> None:
    """Refuse a profile of other blocks, or of smaller micro-batches, than the plan's.

    Raises:
        UsageError: naming what does not fit.
    """
    for fault in _faults(plan, profile):
        raise UsageError(f"the profile is not the plan's: {fault}", hint="give the profile that the plan was made from")


def _faults(plan: Plan, profile: Profile) -> Iterator[str]:
    if plan.block_names != profile.block_names:
        yield f"its model has {len(profile.block_names)} blocks of other names than the plan's {len(plan.block_names)}"
    planned = {cls.name: (cls.graph_hash, cls.blocks) for cls in plan.classes}
    measured = {cls.name: (cls.graph_hash, cls.blocks) for cls in profile.classes}
    for name in sorted(planned.keys() | measured.keys()):
        if planned.get(name) != measured.get(name):
            yield f"its blocks of the class {name!r} are others"
    largest = profile.points[-1].tokens
    if plan.entries[-1].tokens_up_to > largest:
        yield f"it was measured up to {largest} tokens, and the plan goes up to {plan.entries[-1].tokens_up_to}"
