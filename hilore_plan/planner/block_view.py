"""One class of blocks at one token count: its graph, what its values weigh, and in which forms they can be kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hilore_plan.planner.between import Between
from hilore_plan.planner.forward import ForwardView, forward_view
from hilore_plan.planner.requests import StageView, stage_views
from hilore_plan.schema.plan import Action, compressed
from hilore_plan.schema.profile import BlockClass, ClassMeasure, Point


@dataclass(frozen=True)
class OpView:
    """One op: what it reads and makes (indices of values), and the seconds that it takes when run alone.

    `exact_inputs` have to be exact in backward if an output that is a slot is kept. `working_bytes` it needs beside its
    outputs while it runs.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool
    seconds: float
    exact_inputs: tuple[int, ...] = ()
    working_bytes: int = 0


@dataclass(frozen=True)
class Form:
    """A way to keep a value in other bytes than its own: `cast` or `compress:CODEC`.

    `seconds` are those of one encoding and one decoding.
    """

    action: Action
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ClassView:
    """One class of blocks at one token count; tuples without a comment run along the values.

    `free` values (parameters, shared inputs) are there whatever the plan does; `inputs` are the others that come from
    outside. `units` are the values that a plan decides on. `forced` ones cannot be rebuilt (slots that are inputs, or
    made by ops that cannot run again): they are stored, or cast where they have that form. `forms` are all ways but
    `store` in which a value can be kept. `backward` has, by stage, what backward holds beside them,
    `forward` what forward does; if that is not known, it is `forward_working_bytes` beside what is kept of the block.
    """

    name: str
    blocks: tuple[int, ...]
    stages: int
    names: tuple[str, ...]
    slots: tuple[tuple[int, ...], ...]
    value_bytes: tuple[int, ...]
    forms: tuple[tuple[Form, ...], ...]
    makers: tuple[int | None, ...]  # the op that makes the value
    readers: tuple[tuple[int, ...], ...]  # the ops that read it
    free: frozenset[int]
    inputs: frozenset[int]
    units: tuple[int, ...]
    forced: frozenset[int]
    ops: tuple[OpView, ...]
    backward: tuple[StageView, ...]
    forward_working_bytes: int
    forward: ForwardView | None

    def form(self, value: int, action: Action) -> Form | None:
        """The form that an action keeps a value in; None if it has no such form."""
        return next((form for form in self.forms[value] if form.action == action), None)


def class_view(cls: BlockClass, between: Between, index: int) -> ClassView:
    """Class number `index` of the profile at the token count of `between`."""
    makers = {value: number for number, op in enumerate(cls.ops) for value in op.outputs}
    readers: list[list[int]] = [[] for _ in cls.values]
    for number, op in enumerate(cls.ops):
        for value in sorted(set(op.inputs)):
            readers[value].append(number)
    seconds = between.numbers(lambda point: point.classes[index].op_seconds)
    free, forced = _free(cls), _forced(cls, makers)
    return ClassView(
        name=cls.name,
        blocks=cls.blocks,
        stages=cls.stages,
        names=tuple(value.name for value in cls.values),
        slots=tuple(tuple(sorted(value.slot_stages)) for value in cls.values),
        value_bytes=between.counts(lambda point: point.classes[index].value_bytes),
        forms=_forms(cls, between, index, _rebuildable(cls) - forced),
        makers=tuple(makers.get(number) for number in range(len(cls.values))),
        readers=tuple(tuple(ops) for ops in readers),
        free=free,
        inputs=frozenset(number for number, value in enumerate(cls.values) if value.kind == "input") - free,
        units=tuple(number for number, value in enumerate(cls.values) if value.keepable),
        forced=forced,
        ops=tuple(
            OpView(op.name, op.inputs, op.outputs, op.recomputable, cost, op.exact_inputs, working)
            for op, cost, working in zip(cls.ops, seconds, _op_working_bytes(cls, between, index), strict=True)
        ),
        backward=stage_views(cls, between, index),
        forward_working_bytes=between.count(lambda point: point.classes[index].forward_working_bytes),
        forward=forward_view(cls, between, index),
    )


def _op_working_bytes(cls: BlockClass, between: Between, index: int) -> tuple[int, ...]:
    if not all(point.classes[index].op_working_bytes for point in (between.low, between.high)):
        return (0,) * len(cls.ops)
    return between.counts(lambda point: point.classes[index].op_working_bytes)


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


def _rebuildable(cls: BlockClass) -> frozenset[int]:
    """Values that can be rebuilt to the bit from the block's inputs and what is stored in any case.

    Only these may be compressed: a micro-batch that turns out riskier than thought has them rebuilt.
    """
    makers = {value: number for number, op in enumerate(cls.ops) for value in op.outputs}
    there = {number for number, value in enumerate(cls.values) if value.kind != "op"} | _forced(cls, makers)
    made: set[int] = set()
    for op in cls.ops:
        if op.recomputable and there.issuperset(op.inputs):
            there.update(op.outputs)
            made.update(op.outputs)
    return frozenset(made)


def _forms(cls: BlockClass, between: Between, index: int, rebuildable: frozenset[int]) -> tuple[tuple[Form, ...], ...]:
    forms: list[list[Form]] = [[] for _ in cls.values]
    narrow = between.counts(lambda point: point.classes[index].narrow_bytes)
    seconds = between.numbers(lambda point: point.classes[index].narrow_seconds)
    for number, value in enumerate(cls.values):
        if value.keepable and value.narrow:
            forms[number].append(Form("cast", narrow[number], seconds[number]))
    for codec in _codecs((between.low.classes[index], between.high.classes[index])):
        for number, form in _coded(between, index, codec):
            if cls.values[number].keepable and number in rebuildable:
                forms[number].append(form)
    return tuple(tuple(found) for found in forms)


def _codecs(measures: tuple[ClassMeasure, ClassMeasure]) -> list[str]:
    low, high = measures
    return [codec for codec in low.codec_bytes if codec in high.codec_bytes]


def _coded(between: Between, index: int, codec: str) -> Iterable[tuple[int, Form]]:
    """The values that a codec takes at both measured points, in its form."""

    def sizes(point: Point) -> tuple[int, ...]:
        return point.classes[index].codec_bytes[codec]

    counts = between.counts(sizes)
    seconds = between.numbers(lambda point: point.classes[index].codec_seconds[codec])
    for number, taken in enumerate(zip(sizes(between.low), sizes(between.high), strict=True)):
        if all(taken):
            yield number, Form(compressed(codec), counts[number], seconds[number])
