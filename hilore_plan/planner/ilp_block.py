"""The part of the integer program that describes one block: see the maths at the head of `ilp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import pulp

from hilore_plan.planner.block_view import ClassView, Form
from hilore_plan.planner.ilp_solver import Constraint, Expression, Program, Scale
from hilore_plan.planner.patterns import Pattern
from hilore_plan.planner.timeline import View
from hilore_plan.schema.plan import Action, codec_of

CERTAIN = 0.5  # solvers give binaries to within a tolerance


Coded = tuple[Form, Expression]


@dataclass(frozen=True)
class BlockProgram:
    """The variables of one block, and its bytes and seconds as expressions of them in the solver's units."""

    cls: ClassView
    store: dict[int, Expression]
    coded: dict[int, list[Coded]]
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
        chosen = (form.action for form, variable in self.coded.get(unit, ()) if (variable.value() or 0) > CERTAIN)
        return next(chosen, "recompute")

    def risk(self, rho: Mapping[tuple[int, Action], float]) -> Expression:
        """The squared error of the compressed values."""
        return pulp.lpSum(
            rho[unit, form.action] * variable
            for unit, forms in self.coded.items()
            for form, variable in forms
            if rho.get((unit, form.action))
        )


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
        self.coded = {unit: self._forms(unit) for unit in units if self.cls.forms[unit]}
        self.ran = {op: [self._share(f"r{op}_{stage}") for stage in self._stages()] for op in self.useful}
        self.inexact = {value: self._share(f"i{value}") for value in _spoiling(self.cls, self.useful)}
        self.wanted = {value: self._wanted(op, value) for op in self.useful for value in self.cls.ops[op].outputs}

    def build(self) -> BlockProgram:
        """All constraints, then the expressions."""
        for unit in self.cls.units:
            self._choose(unit)
        for value in range(len(self.cls.names)):
            self._serve_slots(value)
        for op in self.useful:
            self._run(op)
        self._keep_exact()
        kept = [self._kept_bytes(value) for value in range(len(self.cls.names))]
        stages = [self._stage_bytes(stage) for stage in self._stages()]
        return BlockProgram(self.cls, self.store, self.coded, pulp.lpSum(kept), stages, self._seconds())

    # variables

    def _stages(self) -> range:
        return range(self.cls.stages)

    def _binary(self, name: str) -> Expression:
        return self.problem.add_variable(self.prefix + name, 0, 1, pulp.LpBinary)

    def _share(self, name: str) -> Expression:
        return self.problem.add_variable(self.prefix + name, 0, 1)

    def _forms(self, unit: int) -> list[Coded]:
        """A binary for each form; the first letter of a name goes on with what tells the codecs apart."""
        codecs = [(form, codec_of(form.action)) for form in self.cls.forms[unit]]
        return [(form, self._binary(f"c{unit}_{codec}" if codec else f"c{unit}")) for form, codec in codecs]

    def _wanted(self, op: int, value: int) -> list[Expression]:
        if len(self.cls.ops[op].outputs) == 1:
            return self.ran[op]  # an op with one output runs when that output is wanted
        return [self._share(f"d{value}_{stage}") for stage in self._stages()]

    def _held(self, value: int) -> Expression:
        """1 if the value is kept in any form."""
        if value in self.store:
            return self.store[value] + sum(variable for _, variable in self.coded.get(value, ()))
        return 1 if value in self.cls.forced else 0

    def _compressed(self, value: int) -> list[Expression]:
        """The binaries of a value's codecs."""
        forms = self.coded.get(value, ())
        return [variable for form, variable in forms if codec_of(form.action) is not None]

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
        elif unit in self.coded:
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
            if stage < self.last:  # what was wanted once counts at the end, where inexactness asks for it
                self._add(wanted <= self.wanted[value][stage + 1])
        slots = self.cls.slots[value]
        if not slots or slots[0] > stage:
            self._add(wanted <= pulp.lpSum(self.ran[reader][stage] for reader in self._readers(value)))

    def _keep_exact(self) -> None:
        """The way back from compression, and what it must not reach; nothing is written where nothing compresses."""
        coded = {value: sum(found) for value in self.coded if (found := self._compressed(value))}
        for value, compressed in coded.items():
            for needed in sorted(self.cls.inputs - self.cls.forced):
                self._add(compressed <= self._held(needed))
            if value in self.inexact:
                self._add(self.inexact[value] >= compressed)
        for number in self.useful:
            for value, source in product(self.cls.ops[number].outputs, sorted(set(self.cls.ops[number].inputs))):
                if value in self.inexact and source in self.inexact:
                    rebuilt = self.wanted[value][self.last]
                    self._add(self.inexact[value] >= self.inexact[source] + rebuilt - 1)
        for op in self.cls.ops:
            kept = [value for value in op.outputs if self.cls.slots[value] and self._can_hold(value)]
            for value, source in product(kept, op.exact_inputs):
                if source in self.inexact:
                    self._add(self.inexact[source] + self._held(value) <= 1)

    # expressions

    def _kept_bytes(self, value: int) -> Expression:
        cls = self.cls
        if value not in self.store:
            return self.scale.bytes(cls.value_bytes[value]) if value in cls.forced else 0
        if value in cls.free:
            return 0
        full = self.scale.bytes(cls.value_bytes[value]) * self.store[value]
        return full + sum(self.scale.bytes(form.bytes) * variable for form, variable in self.coded.get(value, ()))

    def _seconds(self) -> Expression:
        micro, unit = self.view.micro_batches, self.scale.second_unit
        scale = micro * self.view.recompute_scale / unit
        ops = [scale * self.cls.ops[op].seconds * self.ran[op][self.last] for op in self.useful]
        coded = [micro / unit * form.seconds * variable for forms in self.coded.values() for form, variable in forms]
        return pulp.lpSum(ops + coded)

    def _stage_bytes(self, stage: int) -> Expression:
        cls = self.cls
        held = [self._held_bytes(value, stage) for value in range(len(cls.names)) if value not in cls.free]
        rebuilt = [self._rebuilt(op, value, stage) for op in self.useful for value in cls.ops[op].outputs]
        decoded = [self.scale.bytes(cls.value_bytes[value]) * self._decoded(value, stage) for value in self.coded]
        return pulp.lpSum([*held, *rebuilt, *decoded, self.scale.bytes(cls.stage_working_bytes[stage])])

    def _held_bytes(self, value: int, stage: int) -> Expression:
        """A kept value counts in stage 0, and on to the last stage that needs it."""
        if not self._can_hold(value):
            return 0
        if stage <= max(self.cls.slots[value], default=0):
            return self._kept_bytes(value)
        sizes = [(self.store.get(value, 1), self.cls.value_bytes[value])]
        sizes += [(variable, form.bytes) for form, variable in self.coded.get(value, ())]
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

    def _decoded(self, value: int, stage: int) -> Expression:
        """1 if the widened or decoded copy of a value is alive: from the first stage that needs it to the last."""
        slots, readers = self.cls.slots[value], self._readers(value)
        by = [1] if slots and slots[0] <= stage else [self.ran[reader][stage] for reader in readers]
        on = [1] if slots and slots[-1] >= stage else [self._later(reader, stage) for reader in readers]
        coded = sum(variable for _, variable in self.coded[value])
        cases = [coded + first + last - 2 for first in by for last in on]
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


def _spoiling(cls: ClassView, useful: Sequence[int]) -> list[int]:
    """The values that compression can make inexact and that something which has to be exact is rebuilt from, or is."""
    reached = {value for value in cls.units if any(codec_of(form.action) is not None for form in cls.forms[value])}
    for op in useful:
        if not reached.isdisjoint(cls.ops[op].inputs):
            reached.update(cls.ops[op].outputs)
    guarded = {value for op in cls.ops for value in op.exact_inputs}
    for op in reversed(useful):
        if not guarded.isdisjoint(cls.ops[op].outputs):
            guarded.update(cls.ops[op].inputs)
    return sorted(reached & guarded)
