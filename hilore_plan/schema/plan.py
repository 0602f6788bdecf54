"""The plan document: what to do with each recovery unit of each block, per token bucket and exposure bucket."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from hilore_plan.schema.record import Environment, GradientState, Mode, Model, Norm, Record, Workload, uncaptured_reason

SCHEMA: Final = "hilore.plan/1"
REVISION = 3

COMPRESS: Final = "compress:"
# `store`, `cast`, `recompute`, or `compress:CODEC`
Action: TypeAlias = Annotated[str, Field(pattern=r"^(store|cast|recompute|compress:[a-z0-9_]+)$")]


def compressed(codec: str) -> Action:
    """The action that keeps a value in a codec's format."""
    return COMPRESS + codec


def codec_of(action: Action) -> str | None:
    """The codec of a `compress` action; None for any other."""
    return action.removeprefix(COMPRESS) if action.startswith(COMPRESS) else None


class Fingerprint(Record):
    """What a block must look like for the plan to fit: its graph's hash and its parameters.

    Blocks that could not be captured have `uncaptured: REASON` for a hash.
    """

    name: str
    graph_hash: str
    blocks: tuple[int, ...]
    parameters: dict[str, str]

    @property
    def uncaptured(self) -> str | None:
        """Why these blocks have no graph; None if they have one."""
        return uncaptured_reason(self.graph_hash)


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

    `recompute_seconds` are the part of `step_seconds` spent on recomputing, on casts and on codecs. `error` is the
    relative gradient error of a step whose micro-batches all run under this entry; `compressed_share` the part of the
    kept bytes that is kept in a codec's format, counted as they were before.
    """

    step_seconds: float
    peak_bytes: int
    recompute_seconds: float
    binding: str
    error: float = Field(default=0.0, ge=0)
    compressed_share: float = Field(default=0.0, ge=0, le=1)


class Group(Record):
    """Blocks of one class that are treated alike; `actions` has every recovery unit of the class by name."""

    class_name: str
    blocks: tuple[int, ...]
    actions: dict[str, Action]


class Entry(Record):
    """The plan for micro-batches of at most `tokens_up_to` tokens and an exposure of at most `exposure_up_to`.

    Exposures are relative to their mean; `exposure_up_to` is None for the highest bucket. `frequency` is the part of
    the calibrated micro-batches that fall into this exposure bucket, `weight` their part of the squared exposure:
    the error of a step is the root of the sum of `weight * error^2`. `store` and `gc` are what the two plain modes cost
    at the bucket's upper edge; `measured` is there once the plan was run.

    `gradients` says which of these micro-batches: `none`, those that begin while no parameter has a gradient, as the
    first of an update does after `zero_grad(set_to_none=True)`; `live`, all others, and those as well if no entry is
    for `none` (before revision 3: no entry was).
    """

    tokens_up_to: int = Field(ge=1)
    gradients: GradientState = "live"
    exposure_up_to: float | None = Field(default=None, ge=0)
    frequency: float = Field(default=1.0, ge=0, le=1)
    weight: float = Field(default=1.0, ge=0, le=1)
    predicted: Prediction
    measured: Mode | None = None
    store: Mode
    gc: Mode
    groups: tuple[Group, ...]


class RiskBudget(Record):
    """The gradient error that compression may cause: as asked (`0.015`, `0.3x-noise`), and as a relative step error.

    `price` is the seconds that the planner pays for a unit of squared relative error, `expected` the error of a step
    with the calibrated mix of exposures, `norm` the norm in which exposures are measured. `binding` says what keeps the
    step from being faster: `risk` if a little more of it would, at the largest size, else `memory` or nothing at all.
    """

    asked: str
    limit: float = Field(ge=0)
    price: float = Field(ge=0)
    expected: float = Field(ge=0)
    norm: Norm = "l2"
    binding: Literal["memory", "risk", "neither"] = "memory"


class Plan(Record):
    """What `hilore apply` runs. Entries ascend by tokens, then by gradients (`none` first), then by exposure."""

    schema_: Literal["hilore.plan/1"] = Field(default=SCHEMA, alias="schema")
    revision: int = REVISION
    created: str
    model: Model
    workload: Workload
    environment: Environment
    budget: Budget
    risk: RiskBudget | None = None
    solver: Solver
    block_names: tuple[str, ...]
    classes: tuple[Fingerprint, ...]
    entries: tuple[Entry, ...] = Field(min_length=1)

    @property
    def distinguishes_gradients(self) -> bool:
        """Whether there are entries for micro-batches that begin without gradients."""
        return any(entry.gradients == "none" for entry in self.entries)

    def share(self, entry: Entry) -> float:
        """The part of an update's micro-batches that an entry is for, if all of them are of its size."""
        return entry.frequency * (self.workload.share(entry.gradients) if self.distinguishes_gradients else 1.0)
