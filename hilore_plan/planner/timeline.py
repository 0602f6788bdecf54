"""A profile seen at one token count: every measure interpolated, and the points of the peak timeline by name.

The simulator and the integer program both read this view, and nothing of each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hilore_plan.errors import UsageError
from hilore_plan.schema.profile import BlockClass, ClassMeasure, Outside, Point, Profile
from hilore_plan.schema.record import Mode


@dataclass(frozen=True)
class OpView:
    """One op: what it reads and makes (indices of values), and the seconds that it takes when run alone."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool
    seconds: float


@dataclass(frozen=True)
class ClassView:
    """One class of blocks at one token count; tuples without a comment run along the values.

    `free` values (parameters, shared inputs) are there whatever the plan does. `units` are the values that a plan
    decides on. `forced` ones cannot be rebuilt (slots that are inputs, or made by ops that cannot run again): they are
    stored, or cast where they are `castable`.
    """

    name: str
    blocks: tuple[int, ...]
    stages: int
    names: tuple[str, ...]
    slots: tuple[tuple[int, ...], ...]
    value_bytes: tuple[int, ...]
    narrow_bytes: tuple[int, ...]
    narrow_seconds: tuple[float, ...]
    makers: tuple[int | None, ...]  # the op that makes the value
    readers: tuple[tuple[int, ...], ...]  # the ops that read it
    free: frozenset[int]
    units: tuple[int, ...]
    forced: frozenset[int]
    castable: frozenset[int]
    ops: tuple[OpView, ...]
    stage_working_bytes: tuple[int, ...]
    forward_working_bytes: int


@dataclass(frozen=True)
class View:
    """A profile at one token count. `blocks` are the planned blocks in order, `class_of` the class of each of them."""

    tokens: int
    accumulation: bool
    micro_batches: int
    recompute_scale: float
    blocks: tuple[int, ...]
    class_of: tuple[int, ...]
    classes: tuple[ClassView, ...]
    outside: Outside
    store: Mode
    gc: Mode

    def class_at(self, position: int) -> ClassView:
        """The class of the block at a position in `blocks`."""
        return self.classes[self.class_of[position]]

    @property
    def fixed_bytes(self) -> int:
        """What is there from the first block's forward to the last one's backward, gradients aside."""
        outside = self.outside
        return outside.parameter_bytes + outside.optimizer_bytes + outside.batch_bytes + outside.embedding_bytes

    def gradient_bytes(self, block: int | None) -> int:
        """Gradients that exist when backward reaches `block`; None stands for the head, before any block."""
        if self.accumulation:
            return self.outside.gradient_bytes
        reached = () if block is None else self.outside.block_gradient_bytes[block:]
        return self.outside.head_gradient_bytes + sum(reached)


def forward_point(block: int) -> str:
    """The name of the point at the end of a block's forward."""
    return f"forward:{block}"


def backward_point(block: int, stage: int) -> str:
    """The name of the point of one stage of a block's backward."""
    return f"backward:{block}:{stage}"


def point_names(view: View) -> tuple[str, ...]:
    """All points of the timeline in the order of time."""
    names = [forward_point(block) for block in view.blocks] + ["head"]
    for position in reversed(range(len(view.blocks))):
        stages = range(view.class_at(position).stages)
        names += [backward_point(view.blocks[position], stage) for stage in stages]
    return (*names, "embedding", "optimizer")


def view_at(profile: Profile, tokens: int) -> View:
    """The profile at `tokens` tokens per micro-batch.

    Measures are linear between the measured points, bytes rounded up; below the smallest point its own measures hold.

    Raises:
        UsageError: if `tokens` is more than was measured: nothing is known about larger micro-batches.
    """
    between = _between(profile, tokens)
    positions = {block: index for index, cls in enumerate(profile.classes) for block in cls.blocks}
    blocks = tuple(sorted(positions))
    return View(
        tokens=tokens,
        accumulation=profile.workload.accumulation,
        micro_batches=profile.workload.micro_batches,
        recompute_scale=between.number(lambda point: point.recompute_scale),
        blocks=blocks,
        class_of=tuple(positions[block] for block in blocks),
        classes=tuple(_class_view(cls, between, index) for index, cls in enumerate(profile.classes)),
        outside=_outside(between),
        store=_mode(between, lambda point: point.store),
        gc=_mode(between, lambda point: point.gc),
    )


@dataclass(frozen=True)
class _Between:
    """Where a token count lies between two measured points."""

    low: Point
    high: Point
    tokens: int

    def count(self, read: Callable[[Point], int]) -> int:
        """An integer measure, rounded up."""
        low, high = read(self.low), read(self.high)
        span = self.high.tokens - self.low.tokens
        if span == 0:
            return low
        # in integers, so that no float rounds a byte away: -(-a // b) is a / b rounded up
        return low - (-(high - low) * (self.tokens - self.low.tokens) // span)

    def number(self, read: Callable[[Point], float]) -> float:
        """A real measure."""
        low, high = read(self.low), read(self.high)
        span = self.high.tokens - self.low.tokens
        return low if span == 0 else low + (high - low) * (self.tokens - self.low.tokens) / span

    def counts(self, read: Callable[[Point], Sequence[int]]) -> tuple[int, ...]:
        """A list of integer measures."""
        return tuple(self.count(lambda point, i=i: read(point)[i]) for i in range(len(read(self.low))))  # type: ignore[misc]

    def numbers(self, read: Callable[[Point], Sequence[float]]) -> tuple[float, ...]:
        """A list of real measures."""
        return tuple(self.number(lambda point, i=i: read(point)[i]) for i in range(len(read(self.low))))  # type: ignore[misc]


def _between(profile: Profile, tokens: int) -> _Between:
    measured = [point.tokens for point in profile.points]
    if tokens > measured[-1]:
        raise UsageError(
            f"the profile was measured up to {measured[-1]} tokens per micro-batch; {tokens} are more",
            hint="profile again with a larger --batch, --prompt-tokens or --response-tokens",
        )
    high = bisect_left(measured, tokens)
    low = high if high == 0 or measured[high] == tokens else high - 1
    return _Between(profile.points[low], profile.points[high], tokens)


def _outside(between: _Between) -> Outside:
    fields = dict.fromkeys(Outside.model_fields)
    fields.pop("block_gradient_bytes")
    counts = {name: between.count(lambda point, name=name: getattr(point.outside, name)) for name in fields}  # type: ignore[misc]
    blocks = between.counts(lambda point: point.outside.block_gradient_bytes)
    return Outside(**counts, block_gradient_bytes=blocks)


def _mode(between: _Between, read: Callable[[Point], Mode]) -> Mode:
    return Mode(
        step_seconds=between.number(lambda point: read(point).step_seconds),
        peak_bytes=between.count(lambda point: read(point).peak_bytes),
    )


def _class_view(cls: BlockClass, between: _Between, index: int) -> ClassView:
    def measure(point: Point) -> ClassMeasure:
        return point.classes[index]

    makers = {value: number for number, op in enumerate(cls.ops) for value in op.outputs}
    readers: list[list[int]] = [[] for _ in cls.values]
    for number, op in enumerate(cls.ops):
        for value in sorted(set(op.inputs)):
            readers[value].append(number)
    seconds = between.numbers(lambda point: measure(point).op_seconds)
    return ClassView(
        name=cls.name,
        blocks=cls.blocks,
        stages=cls.stages,
        names=tuple(value.name for value in cls.values),
        slots=tuple(tuple(sorted(value.slot_stages)) for value in cls.values),
        value_bytes=between.counts(lambda point: measure(point).value_bytes),
        narrow_bytes=between.counts(lambda point: measure(point).narrow_bytes),
        narrow_seconds=between.numbers(lambda point: measure(point).narrow_seconds),
        makers=tuple(makers.get(number) for number in range(len(cls.values))),
        readers=tuple(tuple(ops) for ops in readers),
        free=_free(cls),
        units=tuple(number for number, value in enumerate(cls.values) if value.keepable),
        forced=_forced(cls, makers),
        castable=frozenset(number for number, value in enumerate(cls.values) if value.keepable and value.narrow),
        ops=tuple(
            OpView(op.name, op.inputs, op.outputs, op.recomputable, cost)
            for op, cost in zip(cls.ops, seconds, strict=True)
        ),
        stage_working_bytes=between.counts(lambda point: measure(point).stage_working_bytes),
        forward_working_bytes=between.count(lambda point: measure(point).forward_working_bytes),
    )


def _free(cls: BlockClass) -> frozenset[int]:
    values = enumerate(cls.values)
    return frozenset(number for number, value in values if value.kind == "parameter" or value.shared)


def _forced(cls: BlockClass, makers: dict[int, int]) -> frozenset[int]:
    """Slots that no program can rebuild: autograd keeps an input that it saved, and a random op must not run again."""

    def stuck(number: int) -> bool:
        maker = makers.get(number)
        return maker is None or not cls.ops[maker].recomputable

    slots = frozenset(number for number, value in enumerate(cls.values) if value.slot_stages)
    return frozenset(number for number in slots if stuck(number)) - _free(cls)
