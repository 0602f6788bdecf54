"""The part of the integer program that says what one block holds in one stage of its backward.

A stage's bytes are a variable that is at least what is held at each moment: before anything is rebuilt, after each op
of the stage's program, which runs in order, and when the program is over. `simulate` has the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from hilore_plan.planner.ilp_common import Common
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

    `common` is what holds whichever way they go.
    """

    def __init__(self, problem: Program, variables: Variables, common: Common, scale: Scale, stage: int) -> None:
        self.problem, self.vars, self.cls, self.scale, self.stage = problem, variables, variables.cls, scale, stage
        self.common = common
        self.known: dict[str, Expression] = {}

    def bytes(self) -> Expression:
        """A variable: the most that is held at any moment."""
        cls, stage = self.cls, self.stage
        pairs = [(op, value) for op in self.vars.useful for value in cls.ops[op].outputs if cls.value_bytes[value]]
        made = [self._made(op, value) for op, value in pairs]
        most = self.vars.amount(f"most_{stage}")
        there = self._named("there", self.common.kept + self._given(pairs, stage))
        self._add(most >= there + self._copies(stage - 1, stage) + self.common.early)
        busy = self._named("busy", there + self._copies(stage, stage))
        asked = self._asked()
        self._add(most >= busy + asked)
        hungry = {op for op in self.vars.useful if cls.ops[op].working_bytes}
        for op in sorted({op for each in made for op in each.goes_at} | {each.op for each in made[-1:]} | hungry):
            live = [each.bytes * each.after(op) for each in made if each.op <= op]
            own = self.scale.bytes(cls.ops[op].working_bytes) * self.vars.now(op, self.stage)
            self._add(most >= busy + pulp.lpSum(live) + own + asked)
        left = self.common.left + self._given(pairs, stage + 1) + self._copies(stage, stage + 1)
        self._add(most >= left + pulp.lpSum(each.bytes * each.end for each in made) + self.common.late)
        return most

    def _add(self, constraint: Constraint) -> None:
        self.problem.addConstraint(constraint)

    def _named(self, name: str, expression: Expression) -> Expression:
        """A variable for an expression that many rows have in common."""
        variable = self.vars.amount(f"{name}_{self.stage}")
        self._add(variable == expression)
        return variable

    def _copies(self, by: int, reading: int) -> Expression:
        """The widened and decoded copies that are there, of values that stage `by` or an earlier one needs."""
        if by < 0:
            return 0
        sizes = self.cls.value_bytes
        return pulp.lpSum(self.scale.bytes(sizes[v]) * self._copied(v, by, reading) for v in self.vars.coded)

    def _copied(self, value: int, by: int, reading: int) -> Expression:
        """1 if such a copy is still needed: as a slot of this stage or a later one, or read in `reading` or later."""
        slots, readers = self.cls.slots[value], self.vars.readers(value)
        first = [1] if slots and slots[0] <= by else [self.vars.ran[reader][by] for reader in readers]
        last = [1] if self._is_slot(value) else self.vars.laters(value, reading)
        coded = sum(variable for _, variable in self.vars.coded[value])
        return self._any(value, f"w{value}_{by}", reading, [coded + f + m - 2 for f in first for m in last])

    def _given(self, pairs: Sequence[tuple[int, int]], reading: int) -> Expression:
        """What earlier stages have made and is a slot of this or a later one, or read in `reading` or later."""
        if not self.stage:
            return 0
        sizes = self.cls.value_bytes
        return pulp.lpSum(self.scale.bytes(sizes[value]) * self._carried(op, value, reading) for op, value in pairs)

    def _carried(self, op: int, value: int, reading: int) -> Expression:
        """1 if an earlier stage has made the value and it is still needed."""
        made = self.vars.before(op, self.stage) - self._kept(op, value)
        return self._needed(f"a{value}", value, made, reading)

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

    def _needed(self, name: str, value: int, made: Expression, reading: int) -> Expression:
        """1 if the value is `made` and a slot of this stage or a later one, or read in `reading` or later.

        What is kept of it may be taken off from `made`, which then goes down to -1.
        """
        if self._is_slot(value):
            cases = [made]
        else:
            cases = [made + later - 1 for later in self.vars.laters(value, reading)]
        return self._any(value, name, reading, cases)

    def _any(self, value: int, name: str, reading: int, cases: Sequence[Expression]) -> Expression:
        """See `Variables.any`; of a slot the same whatever is read, and so one variable."""
        name = f"{name}_{self.stage}" if self._is_slot(value) else f"{name}_{self.stage}_{reading}"
        if name not in self.known:
            self.known[name] = self.vars.any(name, cases)
        return self.known[name]

    def _is_slot(self, value: int) -> bool:
        return self.stage <= max(self.cls.slots[value], default=-1)

    def _kept(self, op: int, value: int) -> Expression:
        """What is to be taken off for a value that is kept and yet made again."""
        return self.vars.held(value) if self._may_be_kept(op, value) else 0

    def _may_be_kept(self, op: int, value: int) -> bool:
        """Whether the op may run again although the value is kept: for the sake of another of its outputs."""
        return len(self.cls.ops[op].outputs) > 1 and self.vars.can_hold(value)

    def _asked(self) -> Expression:
        """What backward holds beside when the first missing value is asked for; at least 0."""
        asked = self.vars.amount(f"asked_{self.stage}")
        missing: list[Expression] = []
        for request in self.cls.backward[self.stage].requests:
            if request.value in self.cls.free or request.value in self.cls.forced:
                continue
            gone = 1 - self.vars.held(request.value)
            if request.held_bytes:
                self._add(asked >= self.scale.bytes(request.held_bytes) * (gone - pulp.lpSum(missing)))
            missing.append(gone)
        return asked
