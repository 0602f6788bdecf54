"""The profile document: the block graphs as data, and what each part costs on the measured hardware."""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import Field

from hilore_plan.schema.record import Environment, Mode, Model, Norm, Record, Workload, uncaptured_reason

SCHEMA: Final = "hilore.profile/1"
REVISION = 5


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
    """One op of a block graph, with its inputs and outputs as indices into the class's values.

    `exact_inputs` have to be exact wherever an output of the op is kept rather than rebuilt: attention keeps the
    log-sum-exp of `q @ k.T`, and an approximate q or k beside it gives rows of probabilities that do not sum to one.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool = True
    exact_inputs: tuple[int, ...] = ()


class BlockClass(Record):
    """Blocks with equal graphs, described once. Ops are in the order of execution.

    Blocks that cannot be captured have `uncaptured: REASON` for a hash, and one op, their whole forward.
    """

    name: str
    graph_hash: str
    blocks: tuple[int, ...]
    parameters: dict[str, str]
    stages: int = Field(ge=1)
    values: tuple[Value, ...]
    ops: tuple[Op, ...]

    @property
    def uncaptured(self) -> str | None:
        """Why these blocks have no graph; None if they have one."""
        return uncaptured_reason(self.graph_hash)


class ClassMeasure(Record):
    """What one block of a class costs at one point; lists run along the class's values or ops.

    `value_bytes` are the bytes of a value's storage, `narrow_bytes` those of its narrowed form (0 where there is none),
    `narrow_seconds` the time to narrow it and to widen it again. `stage_working_bytes` are what a stage of backward
    needs beyond the values it was given, `forward_working_bytes` what forward needs beyond the values it keeps.
    `op_working_bytes` are what each op needs beside its outputs while it runs, nothing where nobody looked.
    `asked_values` are, by stage, the values with slots in it in the order in which backward first asks for them, and
    `asked_bytes` what backward holds at that moment beyond the values of the stage. `asked_peaks` have one number more:
    the most of that before the first request, and from each to the next. All are empty where nobody looked.
    `forward_values` are the values in the order in which a forward that keeps nothing saves them and, the second time,
    lets go of them; `forward_peaks` have one number more, the most that it holds before the first of these events and
    from each to the next, without its input. Empty where nobody looked.
    `codec_bytes` and `codec_seconds` are, by codec, the bytes of each value in its format (0 where the codec does not
    take it) and the time to encode and decode it.
    """

    value_bytes: tuple[int, ...]
    op_seconds: tuple[float, ...]
    narrow_bytes: tuple[int, ...]
    narrow_seconds: tuple[float, ...]
    stage_working_bytes: tuple[int, ...]
    forward_working_bytes: int
    op_working_bytes: tuple[int, ...] = ()
    asked_values: tuple[tuple[int, ...], ...] = ()
    asked_bytes: tuple[tuple[int, ...], ...] = ()
    asked_peaks: tuple[tuple[int, ...], ...] = ()
    forward_values: tuple[int, ...] = ()
    forward_peaks: tuple[int, ...] = ()
    codec_bytes: dict[str, tuple[int, ...]] = Field(default={})
    codec_seconds: dict[str, tuple[float, ...]] = Field(default={})


class Transient(Record):
    """Those fields of a `ClassMeasure` that depend on which gradients there are when backward begins."""

    stage_working_bytes: tuple[int, ...]
    forward_working_bytes: int
    asked_values: tuple[tuple[int, ...], ...] = ()
    asked_bytes: tuple[tuple[int, ...], ...] = ()
    asked_peaks: tuple[tuple[int, ...], ...] = ()


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


class WithoutGradients(Record):
    """What is different in a micro-batch that begins without any gradient; the lists run along the profile's classes.

    Gradients then arise as backward goes on. A new one is what its computation made, without a copy, so that working
    memory is less than where it is added to one that was there: `*_working_bytes` are as in `Outside`.
    """

    classes: tuple[Transient, ...]
    head_working_bytes: int
    embedding_working_bytes: int
    optimizer_working_bytes: int


class Point(Record):
    """Everything measured at one micro-batch size: `batch` rows of `length` tokens.

    `recompute_scale` is what a second of recomputation costs within a training step, over what the same ops cost alone.
    `without_gradients` is what differs in the first micro-batch of an update that accumulates: None where all of them
    begin without gradients, and before revision 5.
    """

    tokens: int = Field(ge=1)
    batch: int = Field(ge=1)
    length: int = Field(ge=1)
    classes: tuple[ClassMeasure, ...]
    outside: Outside
    store: Mode
    gc: Mode
    recompute_scale: float = Field(gt=0)
    without_gradients: WithoutGradients | None = None


class UnitRisk(Record):
    """The error that one codec on one unit causes, in each block of the class (in the order of its `blocks`).

    Both are squared errors of the gradient of a step, relative to that gradient, with the unit compressed in every
    micro-batch: `local` in the block's own parameters, `propagated` in everything below, as much as arrives there
    (before revision 4: if it went down undamped). `spread` is the relative standard error of their sum, from how it
    differs between micro-batches (before revision 4: not there).
    """

    unit: str
    codec: str
    local: tuple[float, ...]
    propagated: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def rho(self, damping: float) -> tuple[float, ...]:
        """The squared error that plans count with in each block: two standard deviations above the mean.

        It is `(local + damping * propagated) * margin(spread)`.
        """
        found = zip(self.local, self.propagated, self.spread or (0.0,) * len(self.local), strict=True)
        return tuple((local + damping * propagated) * margin(spread) for local, propagated, spread in found)


def margin(spread: float) -> float:
    """The factor on a calibrated squared error that 39 of 40 steps stay below, were errors normally distributed.

    What was calibrated is off by its standard error, and so is a step of as many micro-batches, both independent: their
    difference has a standard deviation of `sqrt(2) * spread`, and this is two of them above.
    """
    return 1 + 2 * math.sqrt(2) * spread


class Mix(Record):
    """A set of compressed units on micro-batches kept aside, its predicted and its measured relative error.

    From revision 4 on, sets are random and of the least risky units by turns, the first one random.
    """

    units: int = Field(ge=1)
    predicted: float = Field(ge=0)
    measured: float = Field(ge=0)


class Exposures(Record):
    """Exposures of the calibrated micro-batches, relative to their mean; `mean` is the absolute one."""

    norm: Norm
    mean: float = Field(ge=0)
    values: tuple[float, ...] = Field(min_length=1)


class Risk(Record):
    """What compression costs in gradient error, calibrated in fp32: `UnitRisk.rho(damping)` per unit and codec.

    `damping` makes the sum fit what sets of units cause together. `units` run along the profile's classes. `noise` is
    the relative difference between the gradient in the workload's dtype and in fp32, `source` where the text came from,
    `zero_is_free` whether a micro-batch without coefficients has no gradient at all.
    """

    damping: float = Field(ge=0)
    units: tuple[tuple[UnitRisk, ...], ...]
    exposures: Exposures
    held_out: tuple[Mix, ...] = ()
    noise: float | None = Field(default=None, ge=0)
    source: str
    micro_batches: int = Field(ge=1)
    zero_is_free: bool = True


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
    codecs: tuple[str, ...] = ()
    risk: Risk | None = None
