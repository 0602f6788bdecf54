"""The plan document: what to do with each recovery unit of each block, per token bucket and exposure bucket."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from hilore_plan.schema.record import Environment, Mode, Model, Record, Workload

SCHEMA: Final = "hilore.plan/1"
REVISION = 1

Action = Literal["store", "cast", "recompute"]


class Fingerprint(Record):
    """What a block must look like for the plan to fit: its graph's hash and its parameters."""

    name: str
    graph_hash: str
    blocks: tuple[int, ...]
    parameters: dict[str, str]


class Budget(Record):
    """The memory budget as asked (`1.1x-gc`) and the bytes that it came to at the profile's largest point."""

    asked: str
    limit_bytes: int


class Solver(Record):
    """Which solver made the plan, and how far from the optimum it may be (relative to the step time)."""

    name: str
    gap: float


class Prediction(Record):
    """What the plan should cost at a bucket's upper edge, and `binding`: the point of the timeline that makes the peak.

    `recompute_seconds` are the part of `step_seconds` spent on recomputing and on casts.
    """

    step_seconds: float
    peak_bytes: int
    recompute_seconds: float
    binding: str


class Group(Record):
    """Blocks of one class that are treated alike; `actions` has every recovery unit of the class by name."""

    class_name: str
    blocks: tuple[int, ...]
    actions: dict[str, Action]


class Entry(Record):
    """The plan for micro-batches of at most `tokens_up_to` tokens and an exposure of at most `exposure_up_to`.

    `exposure_up_to` is None for the highest bucket. `store` and `gc` are what the two plain modes cost at the bucket's
    upper edge; `measured` is there once the plan was run.
    """

    tokens_up_to: int = Field(ge=1)
    exposure_up_to: float | None = None
    predicted: Prediction
    measured: Mode | None = None
    store: Mode
    gc: Mode
    groups: tuple[Group, ...]


class Plan(Record):
    """What `hilore apply` runs. Entries ascend by tokens, then by exposure."""

    schema_: Literal["hilore.plan/1"] = Field(default=SCHEMA, alias="schema")
    revision: int = REVISION
    created: str
    model: Model
    workload: Workload
    environment: Environment
    budget: Budget
    solver: Solver
    block_names: tuple[str, ...]
    classes: tuple[Fingerprint, ...]
    entries: tuple[Entry, ...] = Field(min_length=1)
