"""Plans without a profile: any actions for any model, to see whether the runtime carries them out exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import samples
from torch import nn

from hilore_plan.graph.blocks import find_blocks
from hilore_plan.graph.recovery_units import BlockGraph, GraphValue, parameter_descriptions
from hilore_plan.runtime.attach import Runtime
from hilore_plan.schema.plan import (
    Action,
    Budget,
    Entry,
    Fingerprint,
    Group,
    Plan,
    Prediction,
    RiskBudget,
    Solver,
    compressed,
)
from hilore_plan.schema.record import Mode, Model

NO_LIMIT = 10**9
Choose = Callable[[GraphValue], Action]


def make_plan(
    model: nn.Module,
    actions: Sequence[Mapping[str, Action]] | None = None,
    tokens: Sequence[int] = (NO_LIMIT,),
    blocks: Sequence[str] | None = None,
) -> Plan:
    """A plan with the given actions per block (none: everything is recomputed), the same for each token bucket."""
    found = find_blocks(model, blocks)
    chosen = actions or [{}] * len(found)
    groups = tuple(Group(class_name="block", blocks=(i,), actions=dict(a)) for i, a in enumerate(chosen))
    mode = Mode(step_seconds=1.0, peak_bytes=1)
    return Plan(
        created="2026-01-01T00:00:00+00:00",
        model=Model(name=type(model).__name__, parameters=1, trainable=1),
        workload=samples.WORKLOAD,
        environment=samples.ENVIRONMENT,
        budget=Budget(asked="1.1x-gc", limit_bytes=1),
        solver=Solver(name="none", gap=0.0),
        block_names=tuple(name for name, _ in found),
        classes=tuple(
            Fingerprint(name=name, graph_hash="", blocks=(i,), parameters=parameter_descriptions(block))
            for i, (name, block) in enumerate(found)
        ),
        entries=tuple(
            Entry(
                tokens_up_to=edge,
                predicted=Prediction(step_seconds=1.0, peak_bytes=1, recompute_seconds=0.0, binding="head"),
                store=mode,
                gc=mode,
                groups=groups,
            )
            for edge in tokens
        ),
    )


def loadable(plan: Plan) -> Plan:
    """The plan with the names of classes in its groups, which a file must have."""
    names = {block: kind.name for kind in plan.classes for block in kind.blocks}
    entries = [
        entry.model_copy(
            update={"groups": tuple(g.model_copy(update={"class_name": names[g.blocks[0]]}) for g in entry.groups)}
        )
        for entry in plan.entries
    ]
    return plan.model_copy(update={"entries": tuple(entries)})


def graphs_of(runtime: Runtime) -> list[BlockGraph]:
    """The first graph that each block ran under a runtime."""
    return [next(iter(planned.stored)) for planned in runtime._blocks]


def choose(graphs: Sequence[BlockGraph], choice: Choose) -> list[dict[str, Action]]:
    """An action for each unit of each block's graph."""
    return [{value.name: choice(value) for value in graph.values if value.keepable} for graph in graphs]


def store(value: GraphValue) -> Action:
    """Keep everything."""
    return "store"


def cast(value: GraphValue) -> Action:
    """Narrow what can be narrowed, recompute the rest."""
    return "cast" if value.narrow else "recompute"


def seeded(seed: int) -> Choose:
    """Any action that fits the unit, at random."""
    draw = random.Random(seed)

    def choice(value: GraphValue) -> Action:
        fitting: list[Action] = ["store", "recompute"]
        return draw.choice([*fitting, "cast"] if value.narrow else fitting)

    return choice


def compress(codec: str) -> Choose:
    """Compress what floats and is made by an op, keep the inputs, recompute the rest."""

    def choice(value: GraphValue) -> Action:
        if value.kind == "input":
            return "store"
        return compressed(codec) if value.fake.is_floating_point() else "recompute"

    return choice


def by_exposure(
    plan: Plan, *edges: tuple[float | None, float, Sequence[Mapping[str, Action]]], limit: float = 0.015
) -> Plan:
    """The plan with an entry for each `(exposure_up_to, error, actions per block)`."""
    last = plan.entries[-1]
    entries = tuple(
        last.model_copy(
            update={
                "exposure_up_to": edge,
                "predicted": last.predicted.model_copy(update={"error": error}),
                "groups": tuple(Group(class_name="block", blocks=(i,), actions=dict(a)) for i, a in enumerate(actions)),
            }
        )
        for edge, error, actions in edges
    )
    risk = RiskBudget(asked=str(limit), limit=limit, price=1.0, expected=0.01)
    return plan.model_copy(update={"entries": entries, "risk": risk})
