"""The part of the integer program that says what one block holds in one stage of its backward.

A stage's bytes are a variable that is at least what is held at each moment: after each op of the stage's program, which
runs in order, and when the program is over and backward needs its working memory. `simulate` has the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from hilore_plan.planner.ilp_solver import Constraint, Expression, Program, Scale
from hilore_plan.planner.ilp_variables import Variables


@dataclass(frozen=True)
class _Made:
    """A value that the stage's program makes: the op, and what of it is there at which ops.

    `at` counts when the op has just run; `until` from then on up to each reader, which are in order, for as long as one
    may still come; `end` after the last of them.
    """

    op: int
    bytes: float
    at: Expression
    until: tuple[tuple[int, Expression], ...]
    end: Expression

    def after(self, op: int) -> Expression:
        """1 if the value is there once `op` has run, its own inputs still being held."""
        if op < self.op:
            return 0
        if op == self.op:
            return self.at
        return next((there for reader, there in self.until if op <= reader), self.end)

    @property
    def goes_at(self) -> set[int]:
        """The ops after which less of it may be there."""
        return {reader for reader, _ in self.until} | ({self.op} if self.at is not self._second else set())

    @property
    def _second(self) -> Expression:
        return self.until[0][1] if self.until else self.end


class StageProgram:
    """What a block holds in stage `stage`, in the solver's units, if its values are rebuilt as `variables` say.

    `ways` are all the variables by which they may be: a frame holds on to what any of them reads.
    """

    def __init__(
        self, problem: Program, variables: Variables, ways: Sequence[Variables], scale: Scale, stage: int
    ) -> None:
        self.problem, self.vars, self.cls, self.scale, self.stage = problem, variables, variables.cls, scale, stage
        self.ways = ways

    def bytes(self) -> Expression:
        """A variable: the most that is held at any moment."""
        cls, values = self.cls, range(len(self.cls.names))
        pairs = [(op, value) for op in self.vars.useful for value in cls.ops[op].outputs if cls.value_bytes[value]]
        held = [self._held(value) for value in values if value not in cls.free]
        decoded = [self.scale.bytes(cls.value_bytes[value]) * self._decoded(value) for value in self.vars.coded]
        carried = [self.scale.bytes(cls.value_bytes[value]) * self._carried(op, value) for op, value in pairs]
        there = self._named("there", pulp.lpSum([*held, *decoded, *carried]))
        made = [self._made(op, value) for op, value in pairs]
        most = self.vars.amount(f"most_{self.stage}")
        working = self.scale.bytes(cls.stage_working_bytes[self.stage])
        self._add(most >= there + pulp.lpSum(each.bytes * each.end for each in made) + working)
        asked = self._asked()
        hungry = {op for op in self.vars.useful if cls.ops[op].working_bytes}
        for op in sorted({op for each in made for op in each.goes_at} | {each.op for each in made[-1:]} | hungry):
            live = [each.bytes * each.after(op) for each in made if each.op <= op]
            own = self.scale.bytes(cls.ops[op].working_bytes) * self.vars.now(op, self.stage)
            self._add(most >= there + pulp.lpSum(live) + own + asked)
        return most

    def _add(self, constraint: Constraint) -> None:
        self.problem.addConstraint(constraint)

    def _named(self, name: str, expression: Expression) -> Expression:
        """A variable for an expression that many rows have in common."""
        variable = self.vars.amount(f"{name}_{self.stage}")
        self._add(variable == expression)
        return variable

    def _held(self, value: int) -> Expression:
        """A kept value counts in stage 0, and on to the last stage that needs it."""
        if not self.vars.can_hold(value):
            return 0
        if self.stage <= max(self.cls.slots[value], default=0):
            return self.vars.kept_bytes(value, self.scale)
        sizes = [(self.vars.store.get(value, 1), self.cls.value_bytes[value])]
        sizes += [(variable, form.bytes) for form, variable in self.vars.forms.get(value, ())]
        laters = [way.later(reader, self.stage) for way in self.ways for reader in way.readers(value)]
        return pulp.lpSum(
            self.scale.bytes(size)
            * self.vars.any(f"k{value}_{self.stage}_{number}", [held + later - 1 for later in laters])
            for number, (held, size) in enumerate(sizes)
        )

    def _decoded(self, value: int) -> Expression:
        """1 if the widened or decoded copy of a value is alive: from the first stage that needs it to the last."""
        slots, readers, stage = self.cls.slots[value], self.vars.readers(value), self.stage
        by = [1] if slots and slots[0] <= stage else [self.vars.ran[reader][stage] for reader in readers]
        on = [1] if slots and slots[-1] >= stage else [self.vars.later(reader, stage) for reader in readers]
        coded = sum(variable for _, variable in self.vars.coded[value])
        return self.vars.any(f"w{value}_{stage}", [coded + first + last - 2 for first in by for last in on])

    def _carried(self, op: int, value: int) -> Expression:
        """1 if an earlier stage has made the value and this one or a later one needs it."""
        if not self.stage:
            return 0
        return self._needed(f"a{value}", value, self.vars.before(op, self.stage) - self._kept(op, value), self.stage)

    def _made(self, op: int, value: int) -> _Made:
        """The value as this stage's program makes it."""
        size = self.scale.bytes(self.cls.value_bytes[value])
        at = self.vars.now(op, self.stage)
        if self._is_slot(value) and not self._may_be_kept(op, value):
            return _Made(op, size, at, (), at)
        readers = self.vars.readers(value)
        if len(readers) == 1 and len(self.cls.ops[op].outputs) == 1:
            return _Made(op, size, at, ((readers[0], at),), 0)  # it was made for that one reader, in this stage
        unkept = at - self._kept(op, value)
        end = self._needed(f"e{value}", value, unkept, self.stage + 1)
        if self._is_slot(value):
            return _Made(op, size, at, (), end)
        until = [(reader, self._until(value, unkept, readers, place)) for place, reader in enumerate(readers)]
        return _Made(op, size, at, tuple(until), end)

    def _until(self, value: int, unkept: Expression, readers: list[int], place: int) -> Expression:
        """1 if the value is made in this stage and one of the readers from `place` on is still to come."""
        earlier = [self.vars.later(reader, self.stage + 1) for reader in readers[:place]]
        later = [self.vars.later(reader, self.stage) for reader in readers[place:]]
        return self.vars.any(f"u{value}_{self.stage}_{place}", [unkept + needed - 1 for needed in (*earlier, *later)])

    def _needed(self, name: str, value: int, made: Expression, stage: int) -> Expression:
        """1 if the value is `made` and a slot of the stage at hand or later, or read in `stage` or later.

        What is kept of it may be taken off from `made`, which then goes down to -1.
        """
        if self._is_slot(value):
            cases = [made]
        elif stage > self.vars.last:
            cases = []
        else:
            cases = [made + self.vars.later(reader, stage) - 1 for reader in self.vars.readers(value)]
        return self.vars.any(f"{name}_{self.stage}", cases)

    def _is_slot(self, value: int) -> bool:
        return self.stage <= max(self.cls.slots[value], default=-1)

    def _kept(self, op: int, value: int) -> Expression:
        """What is to be taken off for a value that is kept and yet made again."""
        return self.vars.held(value) if self._may_be_kept(op, value) else 0

    def _may_be_kept(self, op: int, value: int) -> bool:
        """Whether the op may run again although the value is kept: for the sake of another of its outputs."""
        return len(self.cls.ops[op].outputs) > 1 and self.vars.can_hold(value)

    def _asked(self) -> Expression:
        """What backward holds beside when the first missing slot is asked for; at least 0."""
        cls = self.cls
        if not cls.asked:
            return self.scale.bytes(cls.stage_working_bytes[self.stage])
        missing: list[Expression] = []
        asked = self.vars.amount(f"asked_{self.stage}")
        for value, count in cls.asked[self.stage]:
            if value in cls.free or value in cls.forced:
                continue
            absent = 1 - self.vars.held(value)
            if count:
                self._add(asked >= self.scale.bytes(count) * (absent - pulp.lpSum(missing)))
            missing.append(absent)
        return asked
