"""What one block costs under one action per unit, in integer bytes: when its forward runs, and stage by stage.

It follows what a frame does, and knows nothing of the integer program's constraints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.inexact import UnrecoverableError, check_compression
from hilore_plan.planner.timeline import View
from hilore_plan.schema.plan import Action, codec_of


@dataclass(frozen=True)
class HeldBytes:
    """What a block holds when it holds most, in forward or in one stage of its backward.

    Kept values, rebuilt ones, and all else. In a stage that is before its ops run again, while they do, beside what
    backward holds by then, or later, when what was only made on the way and read for it is gone. Where something is
    compressed, it is what the stage holds if the micro-batch turns out riskier than thought and all of that is rebuilt
    exactly, if that is more.
    """

    kept: int
    rebuilt: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.rebuilt + self.working


@dataclass(frozen=True)
class BlockCost:
    """What one block costs: bytes kept from forward on, and seconds of a whole step beyond store-everything.

    While its forward runs it holds `forward`, and in each stage of its backward what `stages` say.
    """

    kept_bytes: int
    forward: HeldBytes
    stages: tuple[HeldBytes, ...]
    seconds: float

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """What it holds at the most: in its forward, and in each stage of its backward."""
        return self.forward.total, *(stage.total for stage in self.stages)


def block_cost(view: View, index: int, pattern: Sequence[Action]) -> BlockCost:
    """The cost of a block of class number `index` under one action per unit, in the order of `units`."""
    cls = view.classes[index]
    kept = _kept(cls, pattern)
    held = _kept_bytes(cls, kept)
    way = _Way(cls, kept, _program(cls, kept))
    check_compression(cls, kept, way.ran, way.needs)
    stages = _stages(way, held)
    scale = view.micro_batches * view.recompute_scale
    seconds = scale * sum(cls.ops[op].seconds for op in sorted(way.ran))
    coding = sum(form.seconds for value, action in kept.items() if (form := cls.form(value, action)) is not None)
    return BlockCost(sum(held.values()), _forward_bytes(way, held), stages, seconds + view.micro_batches * coding)


def _kept(cls: ClassView, pattern: Sequence[Action]) -> dict[int, Action]:
    kept: dict[int, Action] = dict.fromkeys(sorted(cls.forced), "store")
    for unit, action in zip(cls.units, pattern, strict=True):
        if action != "recompute":
            kept[unit] = action
        elif unit in cls.forced:
            raise UnrecoverableError(f"{cls.name}: {cls.names[unit]} cannot be recomputed")
        if action not in ("store", "recompute") and cls.form(unit, action) is None:
            raise UnrecoverableError(f"{cls.name}: {cls.names[unit]} {_lacking(action)}")
    return kept


def _lacking(action: Action) -> str:
    codec = codec_of(action)
    return "has no narrower form to be cast to" if codec is None else f"cannot be compressed with {codec}"


def _kept_bytes(cls: ClassView, kept: Mapping[int, Action]) -> dict[int, int]:
    sizes = {}
    for value, action in kept.items():
        form = cls.form(value, action)
        if value not in cls.free:
            sizes[value] = cls.value_bytes[value] if form is None else form.bytes
    return sizes


def _program(cls: ClassView, kept: Mapping[int, Action]) -> dict[int, int]:
    """The stage in which each op runs again: the first that needs something of it, for an op runs at most once."""
    ran: dict[int, int] = {}
    for stage in range(cls.stages):
        missing = [value for value, slots in enumerate(cls.slots) if stage in slots]
        while missing:
            value = missing.pop()
            if value in kept or value in cls.free:
                continue
            maker = cls.makers[value]
            if maker is None or not cls.ops[maker].recomputable:
                raise UnrecoverableError(f"{cls.name}: nothing can rebuild {cls.names[value]}, which is not kept")
            if maker not in ran:
                ran[maker] = stage
                missing.extend(cls.ops[maker].inputs)
    return ran


@dataclass(frozen=True)
class _Way:
    """One way in which a block's values come back: what is kept and read, and in which stage each op runs again."""

    cls: ClassView
    kept: Mapping[int, Action]
    ran: Mapping[int, int]

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each value the stages that need it, as a slot or as an input of an op that runs then."""
        return [[*slots, *reads] for slots, reads in zip(self.cls.slots, self._reads, strict=True)]

    @cached_property
    def lasts(self) -> list[int]:
        """For each value the last stage that needs it while that is rebuilt."""
        return [max(each, default=-1) for each in self.needs]

    @cached_property
    def lasts_after(self) -> list[int]:
        """For each value the last stage that needs it when that has been rebuilt: what only a program reads is gone."""
        pairs = zip(self.cls.slots, self._reads, strict=True)
        return [max((*slots, *(stage - 1 for stage in reads)), default=-1) for slots, reads in pairs]

    @cached_property
    def _reads(self) -> list[list[int]]:
        return [[self.ran[op] for op in readers if op in self.ran] for readers in self.cls.readers]

    def whole_bytes(self, values: Iterable[int]) -> int:
        """Bytes of values as backward sees them."""
        return sum(self.cls.value_bytes[value] for value in values)

    def made_before(self, stage: int) -> list[int]:
        """What earlier stages have made: rebuilt values, and widened or decoded copies of kept ones."""
        ops = (op for op, when in self.ran.items() if when < stage)
        rebuilt = [value for op in ops for value in self.cls.ops[op].outputs if value not in self.kept]
        return rebuilt + [value for value in self._coded if min(self.needs[value], default=stage) < stage]

    def decoded_in(self, stage: int) -> list[int]:
        """The values that are widened or decoded in a stage."""
        return [value for value in self._coded if min(self.needs[value], default=-1) == stage]

    @property
    def _coded(self) -> list[int]:
        return [value for value, action in self.kept.items() if action != "store"]


def _forward_bytes(way: _Way, held: Mapping[int, int]) -> HeldBytes:
    """What forward holds at its worst moment: whole values count when it would let go of them, others once encoded."""
    cls = way.cls
    if cls.forward is None:
        return HeldBytes(sum(held.values()), 0, cls.forward_working_bytes)
    moments = []
    for moment in cls.forward.moments:
        kept = sum(n for v, n in held.items() if v in (moment.gone if way.kept[v] == "store" else moment.saved))
        moments.append(HeldBytes(kept, 0, cls.forward.input_bytes + moment.peak_bytes))
    return max(moments, key=lambda moment: moment.total)


def _stages(way: _Way, held: Mapping[int, int]) -> tuple[HeldBytes, ...]:
    """What each stage holds, with and without what is compressed being rebuilt exactly: a frame is ready for both."""
    ways = [way]
    exact = {value: action for value, action in way.kept.items() if codec_of(action) is None}
    if len(exact) < len(way.kept):
        ways.append(_Way(way.cls, exact, _program(way.cls, exact)))
    stages = []
    for stage in range(way.cls.stages):
        before = sum(n for value, n in held.items() if stage <= max(0, *(each.lasts[value] for each in ways)))
        after = sum(n for value, n in held.items() if stage <= max(each.lasts_after[value] for each in ways))
        stages.append(max((_stage(each, stage, before, after) for each in ways), key=lambda most: most.total))
    return tuple(stages)


def _stage(way: _Way, stage: int, before: int, after: int) -> HeldBytes:
    """What is held in a stage at its worst moment: of what was kept in forward `before` bytes, `after` its program.

    Until backward asks for the first value that is not there as it is, nothing has been made. The widened or decoded
    copy of a value that is kept in another form is there from the first stage that needs it to the last, like all that
    a stage has made for itself or a later one.
    """
    cls, view = way.cls, way.cls.backward[stage]
    absent = [
        number
        for number, request in enumerate(view.requests)
        if way.kept.get(request.value) != "store" and request.value not in cls.free
    ]
    given = [value for value in way.made_before(stage) if way.lasts[value] >= stage]
    first = absent[0] if absent else len(view.requests)
    early = HeldBytes(before, way.whole_bytes(given), view.peak_before(first))
    decoded = way.decoded_in(stage)
    most, end = _program_bytes(way, stage)
    asked = next((r.held_bytes for r in (view.requests[n] for n in absent) if r.value not in way.kept), 0)
    rebuilding = HeldBytes(before, way.whole_bytes([*given, *decoded]) + most, asked)
    left = [value for value in (*given, *decoded) if way.lasts_after[value] >= stage]
    late = HeldBytes(after, way.whole_bytes(left) + end, view.peak_from(first))
    return max(late, rebuilding, early, key=lambda moment: moment.total)


def _program_bytes(way: _Way, stage: int) -> tuple[int, int]:
    """The most that a stage's program holds of what it makes, and what is left of that when it is over.

    Its ops run in order, each with its own working memory. All that an op makes is there when it has run, and goes with
    the last op that reads it, unless it is a slot or a later stage reads it.
    """
    cls = way.cls
    live = most = 0
    dying: dict[int, int] = {}
    for op in sorted(op for op, when in way.ran.items() if when == stage):
        for value in cls.ops[op].outputs:
            live += cls.value_bytes[value]
            if (last := _last_use(way, value, op, stage)) is not None:
                dying[last] = dying.get(last, 0) + cls.value_bytes[value]
        most = max(most, live + cls.ops[op].working_bytes)
        live -= dying.pop(op, 0)
    return most, live


def _last_use(way: _Way, value: int, maker: int, stage: int) -> int | None:
    """The op after which a value made in this stage is gone; None if it is still there when the program is over."""
    if value in way.kept:
        return maker
    if way.lasts_after[value] >= stage:
        return None
    return max((op for op in way.cls.readers[value] if op in way.ran), default=maker)
