"""What was solved, as the entries of a plan document and its account of risk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hilore_plan.planner.asked import Wanted
from hilore_plan.planner.buckets import Bucket
from hilore_plan.planner.patterns import Pattern, named
from hilore_plan.planner.risk import compressed_share
from hilore_plan.planner.share import Shared
from hilore_plan.planner.solve import Solved
from hilore_plan.planner.timeline import View
from hilore_plan.schema import plan as schema
from hilore_plan.schema.record import GradientState


def entry(view: View, solved: Solved, bucket: Bucket, extra: int, gradients: GradientState = "live") -> schema.Entry:
    """The entry for one bucket of sizes and exposures; `extra` bytes are added to its predicted peak."""
    simulation = solved.simulation
    return schema.Entry(
        tokens_up_to=view.tokens,
        gradients=gradients,
        exposure_up_to=bucket.edge,
        frequency=bucket.frequency,
        weight=bucket.weight,
        predicted=schema.Prediction(
            step_seconds=simulation.step_seconds,
            peak_bytes=simulation.peak_bytes + extra,
            recompute_seconds=simulation.recompute_seconds,
            binding=simulation.binding,
            error=math.sqrt(solved.risk),
            compressed_share=compressed_share(view, solved.columns),
        ),
        store=view.store,
        gc=view.gc,
        groups=_groups(view, solved),
    )


def risk_budget(wanted: Wanted, shared: Sequence[Shared]) -> schema.RiskBudget:
    """The risk as asked and as used: price of the last kind of micro-batch, error of the kind that has the largest."""
    return schema.RiskBudget(
        asked=wanted.asked,
        limit=wanted.limit,
        price=shared[-1].price,
        expected=min(wanted.limit, math.sqrt(max(found.risk for found in shared))),
        norm=wanted.risk.exposures.norm,
        binding=binding(shared[-1]),
    )


def binding(shared: Shared) -> Literal["memory", "risk", "neither"]:
    """What keeps the steps of one size from being faster.

    Nothing if they recompute nothing; risk if a little more of it would make them faster; memory, of which enough would
    store everything, in all other cases.
    """
    if all(plan.simulation.recompute_seconds == 0 for plan in shared.plans):
        return "neither"
    return "risk" if shared.tight else "memory"


def _groups(view: View, solved: Solved) -> tuple[schema.Group, ...]:
    """Blocks of one class that are treated alike, in the order of their first block."""
    alike: dict[tuple[int, Pattern], list[int]] = {}
    for block, index, found in zip(view.blocks, view.class_of, solved.columns, strict=True):
        alike.setdefault((index, found.pattern), []).append(block)
    return tuple(
        schema.Group(
            class_name=view.classes[index].name,
            blocks=tuple(blocks),
            actions=named(view.classes[index], pattern),
        )
        for (index, pattern), blocks in alike.items()
    )
