"""The bench document: a plan beside the other ways to run the same actor update, measured in turn."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from hilore_plan.schema.record import Environment, Mode, Record, Workload

SCHEMA: Final = "hilore.bench/1"
REVISION = 1


class Spread(Record):
    """Seconds of a step over the repeats."""

    median: float
    min: float
    max: float


class ModeResult(Record):
    """One mode: its name (`plan`, `gc`, `store`, `sac-attention`, `sac-matmul`) and what was measured.

    `throughput_vs_gc` is the median over rounds of gc's seconds over this mode's, so it may differ a little from the
    ratio of the two median steps.
    `gradient_error` is the norm of the difference from the store-everything gradient over the norm of that gradient;
    exactly 0.0 when every gradient is bit-equal.
    """

    name: str
    step_seconds: Spread
    tokens_per_second: float
    peak_bytes: int
    throughput_vs_gc: float
    peak_vs_gc: float
    gradient_error: float
    predicted: Mode | None = None


class Bench(Record):
    """What `hilore bench --json` writes."""

    schema_: Literal["hilore.bench/1"] = Field(default=SCHEMA, alias="schema")
    revision: int = REVISION
    created: str
    command: str
    pairs: int
    workload: Workload
    environment: Environment
    modes: tuple[ModeResult, ...]
