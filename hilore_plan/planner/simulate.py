"""The independent simulator: what a set of actions costs, in integer bytes at every point of the timeline.

It plays a step as the runtime does, stage by stage, and knows nothing of the integer program's constraints. Every
solution passes through it before it becomes a plan, because solvers work in floats and can be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.inexact import UnrecoverableError, check_compression
from hilore_plan.planner.timeline import View, backward_point, forward_point
from hilore_plan.schema.plan import Action, codec_of


@dataclass(frozen=True)
class StageBytes:
    """What a block holds in one stage of its backward, when it holds most: kept values, rebuilt ones, and all else.

    That is either while the stage's ops run again, beside what backward holds by then, or later, when what was only
    made on the way is gone and backward needs the most working memory. Where something is compressed, it is what the
    stage holds if the micro-batch turns out riskier than thought and all of that is rebuilt exactly, if that is more.
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
    """What one block costs: bytes kept from forward on, bytes per stage of backward, seconds beyond store-everything.

    `seconds` are for a whole step with all its micro-batches.
    """

    kept_bytes: int
    stages: tuple[StageBytes, ...]
    seconds: float


@dataclass(frozen=True)
class PointBytes:
    """The memory at one point of the timeline, by what holds it."""

    name: str
    fixed: int
    gradients: int
    kept: int
    rebuilt: int
    working: int

    @property
    def total(self) -> int:
        """All of it: what `max_memory_allocated` would see."""
        return self.fixed + self.gradients + self.kept + self.rebuilt + self.working


@dataclass(frozen=True)
class Simulation:
    """What a plan costs at one token count. `binding` is the first point that reaches the peak."""

    points: tuple[PointBytes, ...]
    peak_bytes: int
    binding: str
    step_seconds: float
    recompute_seconds: float


def simulate(view: View, actions: Sequence[Mapping[str, Action]]) -> Simulation:
    """Play one step under `actions`, one mapping from unit name to action per block of `view.blocks`.

    Raises:
        UnrecoverableError: if a saved tensor can neither be found nor be rebuilt.
    """
    return assemble(view, block_costs(view, actions))


def timeline(view: View, actions: Sequence[Mapping[str, Action]]) -> tuple[PointBytes, ...]:
    """The bytes at every point, in the order of time and split by what holds them: made for looking at."""
    return simulate(view, actions).points


def block_costs(view: View, actions: Sequence[Mapping[str, Action]]) -> list[BlockCost]:
    """The cost of each block; blocks of one class that are treated alike are computed once."""
    known: dict[tuple[int, tuple[Action, ...]], BlockCost] = {}
    costs = []
    for index, chosen in zip(view.class_of, actions, strict=True):
        cls = view.classes[index]
        key = index, tuple(chosen[cls.names[unit]] for unit in cls.units)
        if key not in known:
            known[key] = block_cost(view, index, key[1])
        costs.append(known[key])
    return costs


def block_cost(view: View, index: int, pattern: Sequence[Action]) -> BlockCost:
    """The cost of a block of class number `index` under one action per unit, in the order of `units`."""
    cls = view.classes[index]
    kept = _kept(cls, pattern)
    held = _kept_bytes(cls, kept)
    ran = _program(cls, kept)
    needs = [_needs(cls, ran, value) for value in range(len(cls.names))]
    check_compression(cls, kept, ran, needs)
    stages = _stages(cls, kept, held, ran, needs)
    scale = view.micro_batches * view.recompute_scale
    seconds = scale * sum(cls.ops[op].seconds for op in sorted(ran))
    coding = sum(form.seconds for value, action in kept.items() if (form := cls.form(value, action)) is not None)
    return BlockCost(sum(held.values()), stages, seconds + view.micro_batches * coding)


def assemble(view: View, costs: Sequence[BlockCost]) -> Simulation:
    """Put the costs of the blocks, in the order of `view.blocks`, on the timeline."""
    points = (*_forward(view, costs), *_backward(view, costs), *_after(view))
    peak = max(points, key=lambda point: point.total)
    recompute = sum(cost.seconds for cost in costs)
    return Simulation(points, peak.total, peak.name, view.store.step_seconds + recompute, recompute)


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


def _needs(cls: ClassView, ran: Mapping[int, int], value: int) -> list[int]:
    """The stages that need a value, as a slot or as an input of an op that runs then."""
    return [*cls.slots[value], *(ran[op] for op in cls.readers[value] if op in ran)]


def _stages(
    cls: ClassView,
    kept: Mapping[int, Action],
    held: Mapping[int, int],
    ran: Mapping[int, int],
    needs: Sequence[Sequence[int]],
) -> tuple[StageBytes, ...]:
    """What each stage holds, with and without what is compressed being rebuilt exactly: a frame is ready for both."""
    exact = {value: action for value, action in kept.items() if codec_of(action) is None}
    if len(exact) == len(kept):
        own = [_own_bytes(held, needs, stage) for stage in range(cls.stages)]
        return tuple(_stage(cls, stage, kept, own[stage], ran, needs) for stage in range(cls.stages))
    back = _program(cls, exact)
    exact_needs = [_needs(cls, back, value) for value in range(len(cls.names))]
    either = [[*one, *other] for one, other in zip(needs, exact_needs, strict=True)]
    stages = []
    for stage in range(cls.stages):
        own_bytes = _own_bytes(held, either, stage)
        planned = _stage(cls, stage, kept, own_bytes, ran, needs)
        exactly = _stage(cls, stage, exact, own_bytes, back, exact_needs)
        stages.append(max(planned, exactly, key=lambda way: way.total))
    return tuple(stages)


def _own_bytes(held: Mapping[int, int], needs: Sequence[Sequence[int]], stage: int) -> int:
    """What is still held in a stage of what was kept in forward."""
    return sum(count for value, count in held.items() if stage <= max(needs[value], default=0))


def _stage(
    cls: ClassView,
    stage: int,
    kept: Mapping[int, Action],
    own: int,
    ran: Mapping[int, int],
    needs: Sequence[Sequence[int]],
) -> StageBytes:
    """What is held in a stage at its worst moment, `own` bytes of it since forward.

    What earlier stages have made for this one is there as long as it lasts. So is the widened or decoded copy of a
    value that is kept in another form, from the first stage that needs it to the last.
    """
    carried = [value for op, when in ran.items() if when < stage for value in cls.ops[op].outputs if value not in kept]
    coded = [value for value, action in kept.items() if action != "store" and min(needs[value], default=stage) <= stage]
    there = sum(cls.value_bytes[value] for value in (*carried, *coded) if max(needs[value], default=-1) >= stage)
    most, end = _program_bytes(cls, stage, kept, ran)
    rebuilding = StageBytes(own, there + most, _asked_bytes(cls, stage, kept))
    after = StageBytes(own, there + end, cls.stage_working_bytes[stage])
    return max(after, rebuilding, key=lambda moment: moment.total)


def _program_bytes(cls: ClassView, stage: int, kept: Mapping[int, Action], ran: Mapping[int, int]) -> tuple[int, int]:
    """The most that a stage's program holds of what it makes, and what is left of that when it is over.

    Its ops run in order, each with its own working memory. All that an op makes is there when it has run, and goes with
    the last op that reads it, unless it is a slot or a later stage reads it.
    """
    live = most = 0
    dying: dict[int, int] = {}
    for op in sorted(op for op, when in ran.items() if when == stage):
        for value in cls.ops[op].outputs:
            live += cls.value_bytes[value]
            if (last := _last_use(cls, value, op, stage, kept, ran)) is not None:
                dying[last] = dying.get(last, 0) + cls.value_bytes[value]
        most = max(most, live + cls.ops[op].working_bytes)
        live -= dying.pop(op, 0)
    return most, live


def _last_use(
    cls: ClassView, value: int, maker: int, stage: int, kept: Mapping[int, Action], ran: Mapping[int, int]
) -> int | None:
    """The op after which a value made in this stage is gone; None if it is still there when the program is over."""
    if value in kept:
        return maker
    readers = [op for op in cls.readers[value] if op in ran]
    if any(slot >= stage for slot in cls.slots[value]) or any(ran[op] > stage for op in readers):
        return None
    return max(readers, default=maker)


def _asked_bytes(cls: ClassView, stage: int, kept: Mapping[int, Action]) -> int:
    """What backward holds beyond the stage's values when that is rebuilt: at the first request for a missing one."""
    if not cls.asked:
        return cls.stage_working_bytes[stage]
    missing = (count for value, count in cls.asked[stage] if value not in kept and value not in cls.free)
    return next(missing, 0)


def _forward(view: View, costs: Sequence[BlockCost]) -> list[PointBytes]:
    outside = view.outside
    early = outside.gradient_bytes if view.accumulation else 0
    points, kept = [], 0
    for position, block in enumerate(view.blocks):
        kept += costs[position].kept_bytes
        working = view.class_at(position).forward_working_bytes
        points.append(PointBytes(forward_point(block), view.fixed_bytes, early, kept, 0, working))
    head = PointBytes("head", view.fixed_bytes, view.gradient_bytes(None), kept, 0, outside.head_working_bytes)
    return [*points, head]


def _backward(view: View, costs: Sequence[BlockCost]) -> list[PointBytes]:
    points = []
    earlier = sum(cost.kept_bytes for cost in costs)
    for position in reversed(range(len(view.blocks))):
        block, cost = view.blocks[position], costs[position]
        earlier -= cost.kept_bytes
        gradients = view.gradient_bytes(block)
        for number, stage in enumerate(cost.stages):
            name = backward_point(block, number)
            held = earlier + stage.kept
            points.append(PointBytes(name, view.fixed_bytes, gradients, held, stage.rebuilt, stage.working))
    return points


def _after(view: View) -> list[PointBytes]:
    outside = view.outside
    gradients = outside.gradient_bytes
    without_embedding = view.fixed_bytes - outside.embedding_bytes
    return [
        PointBytes("embedding", view.fixed_bytes, gradients, 0, 0, outside.embedding_working_bytes),
        PointBytes("optimizer", without_embedding, gradients, 0, 0, outside.optimizer_working_bytes),
    ]
