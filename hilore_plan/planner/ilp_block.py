"""The part of the integer program that describes one block: see the maths at the head of `ilp`."""

from __future__ import annotations

from dataclasses import dataclass

import pulp

from hilore_plan.planner.ilp_solver import Constraint, Expression, Program, Scale
from hilore_plan.planner.patterns import Pattern
from hilore_plan.planner.timeline import ClassView, View
from hilore_plan.schema.plan import Action

CERTAIN = 0.5  # solvers give binaries to within a tolerance


@dataclass(frozen=True)
class BlockProgram:
    """The variables of one block, and its bytes and seconds as expressions of them in the solver's units."""

    cls: ClassView
    store: dict[int, Expression]
    cast: dict[int, Expression]
    kept: Expression
    stages: list[Expression]
    seconds: Expression

    def pattern(self) -> Pattern:
        """The actions of the solution just found."""
        return tuple(self._action(unit) for unit in self.cls.units)

    def _action(self, unit: int) -> Action:
        # a variable without cost or constraint never reaches the solver, and its value is None
        if (self.store[unit].value() or 0) > CERTAIN:
            return "store"
        return "cast" if unit in self.cast and (self.cast[unit].value() or 0) > CERTAIN else "recompute"


def add_block(problem: Program, view: View, index: int, scale: Scale, prefix: str) -> BlockProgram:
    """Add the variables and constraints of a block of class number `index` to a problem."""
    return _Builder(problem, view, index, scale, prefix).build()


class _Builder:
    """Writes one block's constraints; names as in the table of `ilp`."""

    def __init__(self, problem: Program, view: View, index: int, scale: Scale, prefix: str) -> None:
        self.problem, self.view, self.cls, self.scale, self.prefix = problem, view, view.classes[index], scale, prefix
        self.last = self.cls.stages - 1
        self.useful = _useful(self.cls)
        units = self.cls.units
        self.store = {unit: self._binary(f"s{unit}") for unit in units}
        self.cast = {unit: self._binary(f"c{unit}") for unit in units if unit in self.cls.castable}
        self.ran = {op: [self._share(f"r{op}_{stage}") for stage in self._stages()] for op in self.useful}
        self.wanted = {value: self._wanted(op, value) for op in self.useful for value in self.cls.ops[op].outputs}

    def build(self) -> BlockProgram:
        """All constraints, then the expressions."""
        for unit in self.cls.units:
            self._choose(unit)
        for value in range(len(self.cls.names)):
            self._serve_slots(value)
        for op in self.useful:
            self._run(op)
        kept = [self._kept_bytes(value) for value in range(len(self.cls.names))]
        stages = [self._stage_bytes(stage) for stage in self._stages()]
        return BlockProgram(self.cls, self.store, self.cast, pulp.lpSum(kept), stages, self._seconds())

    # variables

    def _stages(self) -> range:
        return range(self.cls.stages)

    def _binary(self, name: str) -> Expression:
        return self.problem.add_variable(self.prefix + name, 0, 1, pulp.LpBinary)

    def _share(self, name: str) -> Expression:
        return self.problem.add_variable(self.prefix + name, 0, 1)

    def _wanted(self, op: int, value: int) -> list[Expression]:
        if len(self.cls.ops[op].outputs) == 1:
            return self.ran[op]  # an op with one output runs when that output is wanted
        return [self._share(f"d{value}_{stage}") for stage in self._stages()]

    def _held(self, value: int) -> Expression:
        """1 if the value is stored or cast."""
        if value in self.store:
            return self.store[value] + self.cast.get(value, 0)
        return 1 if value in self.cls.forced else 0

    def _can_hold(self, value: int) -> bool:
        return value in self.store or value in self.cls.forced

    def _later(self, op: int, stage: int) -> Expression:
        """1 if the op runs in this stage or a later one."""
        return self.ran[op][self.last] - self.ran[op][stage - 1] if stage else self.ran[op][self.last]

    def _readers(self, value: int) -> list[int]:
        return [op for op in self.cls.readers[value] if op in self.ran]

    def _add(self, constraint: Constraint) -> None:
        self.problem.addConstraint(constraint)

    # constraints

    def _choose(self, unit: int) -> None:
        if unit in self.cls.forced:
            self._add(self._held(unit) == 1)
        elif unit in self.cast:
            self._add(self._held(unit) <= 1)

    def _serve_slots(self, value: int) -> None:
        slots = self.cls.slots[value]
        if slots and value in self.wanted:
            self._add(self.wanted[value][slots[0]] + self._held(value) >= 1)

    def _run(self, op: int) -> None:
        view = self.cls.ops[op]
        for stage in self._stages():
            ran = self.ran[op][stage]
            if stage < self.last:
                self._add(ran <= self.ran[op][stage + 1])
            for value in sorted(set(view.inputs) - self.cls.free):
                there = self.wanted[value][stage] if value in self.wanted else 0
                self._add(ran <= there + self._held(value))
            if len(view.outputs) > 1:
                self._add(ran <= pulp.lpSum(self.wanted[value][stage] for value in view.outputs))
            for value in view.outputs:
                self._want(op, value, stage)

    def _want(self, op: int, value: int, stage: int) -> None:
        """Nothing is wanted before its time: the runtime is lazy, so the program must not run ahead of it."""
        wanted = self.wanted[value][stage]
        if self._can_hold(value):
            self._add(wanted <= 1 - self._held(value))
        if len(self.cls.ops[op].outputs) > 1:
            self._add(wanted <= self.ran[op][stage])
        slots = self.cls.slots[value]
        if not slots or slots[0] > stage:
            self._add(wanted <= pulp.lpSum(self.ran[reader][stage] for reader in self._readers(value)))

    # expressions

    def _kept_bytes(self, value: int) -> Expression:
        cls = self.cls
        if value not in self.store:
            return self.scale.bytes(cls.value_bytes[value]) if value in cls.forced else 0
        if value in cls.free:
            return 0
        full = self.scale.bytes(cls.value_bytes[value]) * self.store[value]
        narrow = self.scale.bytes(cls.narrow_bytes[value]) * self.cast[value] if value in self.cast else 0
        return full + narrow

    def _seconds(self) -> Expression:
        micro, unit = self.view.micro_batches, self.scale.second_unit
        scale = micro * self.view.recompute_scale / unit
        ops = [scale * self.cls.ops[op].seconds * self.ran[op][self.last] for op in self.useful]
        casts = [micro / unit * self.cls.narrow_seconds[value] * cast for value, cast in self.cast.items()]
        return pulp.lpSum(ops + casts)

    def _stage_bytes(self, stage: int) -> Expression:
        cls = self.cls
        held = [self._held_bytes(value, stage) for value in range(len(cls.names)) if value not in cls.free]
        rebuilt = [self._rebuilt(op, value, stage) for op in self.useful for value in cls.ops[op].outputs]
        widened = [self.scale.bytes(cls.value_bytes[value]) * self._wide(value, stage) for value in self.cast]
        return pulp.lpSum([*held, *rebuilt, *widened, self.scale.bytes(cls.stage_working_bytes[stage])])

    def _held_bytes(self, value: int, stage: int) -> Expression:
        """A kept value counts in stage 0, and on to the last stage that needs it."""
        if not self._can_hold(value):
            return 0
        if stage <= max(self.cls.slots[value], default=0):
            return self._kept_bytes(value)
        sizes = [(self.store.get(value, 1), self.cls.value_bytes[value])]
        if value in self.cast:
            sizes.append((self.cast[value], self.cls.narrow_bytes[value]))
        laters = [self._later(reader, stage) for reader in self._readers(value)]
        return pulp.lpSum(
            self.scale.bytes(size) * self._any(f"k{value}_{stage}_{number}", [held + later - 1 for later in laters])
            for number, (held, size) in enumerate(sizes)
        )

    def _rebuilt(self, op: int, value: int, stage: int) -> Expression:
        """What an op makes counts in the stage that it runs in, and on to the last stage that needs it."""
        ran, size = self.ran[op], self.scale.bytes(self.cls.value_bytes[value])
        if stage == 0 or not size:
            return size * ran[0]
        made = ran[stage] if len(self.cls.ops[op].outputs) == 1 else ran[stage] - self._held(value)
        if stage <= max(self.cls.slots[value], default=-1):
            lasting = [made]
        else:
            lasting = [made + self._later(reader, stage) - 1 for reader in self._readers(value)]
        return size * self._any(f"a{value}_{stage}", [ran[stage] - ran[stage - 1], *lasting])

    def _wide(self, value: int, stage: int) -> Expression:
        """1 if the widened copy of a cast value is alive: from the first stage that needs it to the last."""
        slots, readers = self.cls.slots[value], self._readers(value)
        by = [1] if slots and slots[0] <= stage else [self.ran[reader][stage] for reader in readers]
        on = [1] if slots and slots[-1] >= stage else [self._later(reader, stage) for reader in readers]
        cases = [self.cast[value] + first + last - 2 for first in by for last in on]
        return self._any(f"w{value}_{stage}", cases)

    def _any(self, name: str, cases: list[Expression]) -> Expression:
        """A variable that is at least each of the cases; minimising bytes or meeting a limit makes it the largest."""
        if not cases:
            return 0
        largest = self._share(name)
        for case in cases:
            self._add(largest >= case)
        return largest


def _useful(cls: ClassView) -> list[int]:
    """The ops whose running can help to rebuild a slot, in the order of execution."""
    useful: set[int] = set()
    for number in reversed(range(len(cls.ops))):
        op = cls.ops[number]
        slots = any(cls.slots[value] for value in op.outputs)
        if op.recomputable and (
            slots or any(reader in useful for value in op.outputs for reader in cls.readers[value])
        ):
            useful.add(number)
    return sorted(useful)
