"""The profile document: the block graphs as data, and what each part costs on the measured hardware."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from hilore_plan.schema.record import Environment, Mode, Model, Record, Workload

SCHEMA: Final = "hilore.profile/1"
REVISION = 1


class Value(Record):
    """One value of a block graph: what an op makes, an input of the block, or a parameter.

    `slot_stages` names, for each slot that is a view of this value, the stage of backward that asks for it; empty if
    autograd saves no view of it. Stage 0 runs first in backward. A `keepable` value is a recovery unit: the plan
    decides on it. A `shared` input is alive anyway, whatever the plan does. `narrow` is the dtype to which `cast`
    narrows the value without loss.
    """

    name: str
    kind: Literal["op", "input", "parameter"]
    dtype: str
    slot_stages: tuple[int, ...] = ()
    keepable: bool = False
    shared: bool = False
    narrow: str | None = None


class Op(Record):
    """One op of a block graph, with its inputs and outputs as indices into the class's values."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool = True


class BlockClass(Record):
    """Blocks with equal graphs, described once. Ops are in the order of execution."""

    name: str
    graph_hash: str
    blocks: tuple[int, ...]
    parameters: dict[str, str]
    stages: int = Field(ge=1)
    values: tuple[Value, ...]
    ops: tuple[Op, ...]


class ClassMeasure(Record):
    """What one block of a class costs at one point; lists run along the class's values or ops.

    `value_bytes` are the bytes of a value's storage, `narrow_bytes` those of its narrowed form (0 where there is none),
    `narrow_seconds` the time to narrow it and to widen it again. `stage_working_bytes` are what a stage of backward
    needs beyond the values it was given, `forward_working_bytes` what forward needs beyond the values it keeps.
    """

    value_bytes: tuple[int, ...]
    op_seconds: tuple[float, ...]
    narrow_bytes: tuple[int, ...]
    narrow_seconds: tuple[float, ...]
    stage_working_bytes: tuple[int, ...]
    forward_working_bytes: int


class Outside(Record):
    """Bytes that live outside the blocks, at one point.

    Always there: `parameter_bytes` (with buffers), `optimizer_bytes`, `batch_bytes`. `embedding_bytes` come before the
    first block and stay until the end of backward (position tables, masks). The `*_working_bytes` are needed only
    while their part runs. `head_gradient_bytes` and `block_gradient_bytes` (one per block) arise as backward reaches
    them, the rest of `gradient_bytes` at the embedding; under accumulation all are there from the start.
    """

    parameter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    gradient_bytes: int
    head_gradient_bytes: int
    block_gradient_bytes: tuple[int, ...]
    embedding_bytes: int
    head_working_bytes: int
    embedding_working_bytes: int
    optimizer_working_bytes: int


class Point(Record):
    """Everything measured at one micro-batch size: `batch` rows of `length` tokens.

    `recompute_scale` is what a second of recomputation costs within a training step, over what the same ops cost alone.
    """

    tokens: int = Field(ge=1)
    batch: int = Field(ge=1)
    length: int = Field(ge=1)
    classes: tuple[ClassMeasure, ...]
    outside: Outside
    store: Mode
    gc: Mode
    recompute_scale: float = Field(gt=0)


class Profile(Record):
    """A model on a machine: what every choice of a plan would cost there. Points ascend by tokens."""

    schema_: Literal["hilore.profile/1"] = Field(default=SCHEMA, alias="schema")
    revision: int = REVISION
    created: str
    model: Model
    workload: Workload
    environment: Environment
    block_names: tuple[str, ...]
    classes: tuple[BlockClass, ...]
    points: tuple[Point, ...] = Field(min_length=1)
