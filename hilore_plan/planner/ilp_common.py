"""The part of the integer program that is the same whichever way the values of a stage come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from hilore_plan.planner.ilp_solver import Constraint, Expression, Program, Scale
from hilore_plan.planner.ilp_variables import Variables


@dataclass(frozen=True)
class Common:
    """Bytes in one stage, in the solver's units.

    `kept` are there since forward while a program has yet to read them, `left` when it has. `early` is what backward
    holds beside before the first value that is not there as it is has been asked for, `late` from then on.
    """

    kept: Expression
    left: Expression
    early: Expression
    late: Expression


def add_common(problem: Program, ways: Sequence[Variables], scale: Scale, stage: int) -> Common:
    """Add what a stage has in common. Of `ways` the first is the planned one; a frame keeps what any of them reads."""
    builder = _Builder(problem, ways, scale, stage)
    return Common(builder.kept_bytes(stage), builder.kept_bytes(stage + 1), builder.early(), builder.late())


class _Builder:
    """Writes one stage's constraints; names as in the table of `ilp`."""

    def __init__(self, problem: Program, ways: Sequence[Variables], scale: Scale, stage: int) -> None:
        self.problem, self.ways, self.scale, self.stage = problem, ways, scale, stage
        self.vars, self.cls = ways[0], ways[0].cls

    def _add(self, constraint: Constraint) -> None:
        self.problem.addConstraint(constraint)

    def kept_bytes(self, reading: int) -> Expression:
        """What is there since forward: slots of this stage or a later one, and what is read in `reading` or later."""
        values = (value for value in range(len(self.cls.names)) if value not in self.cls.free)
        return pulp.lpSum(self._held(value, reading) for value in values)

    def _held(self, value: int, reading: int) -> Expression:
        """A kept value counts in stage 0 until it is over, and on to the last stage that needs it."""
        if not self.vars.can_hold(value):
            return 0
        if self.stage <= max(self.cls.slots[value], default=-1) or not reading:
            return self.vars.kept_bytes(value, self.scale)
        sizes = [(self.vars.stored(value), self.cls.value_bytes[value])]
        sizes += [(variable, form.bytes) for form, variable in self.vars.forms.get(value, ())]
        laters = [later for way in self.ways for later in way.laters(value, reading)]
        return pulp.lpSum(
            self.scale.bytes(size)
            * self.vars.any(f"k{value}_{self.stage}_{reading}_{number}", [held + later - 1 for later in laters])
            for number, (held, size) in enumerate(sizes)
        )

    def early(self) -> Expression:
        """A variable: the most before the first request for a value that is not there as it is."""
        view, early = self.cls.backward[self.stage], self.vars.amount(f"early_{self.stage}")
        self._add(early >= self.scale.bytes(view.early_bytes))
        absent: list[Expression] = []
        for number, request in enumerate(view.requests):
            absent.append(self._absent(request.value))
            if request.peak_bytes > view.peak_before(number):
                self._add(early >= self.scale.bytes(request.peak_bytes) * (1 - pulp.lpSum(absent)))
        return early

    def late(self) -> Expression:
        """A variable: the most from that request on; at least 0."""
        view, late = self.cls.backward[self.stage], self.vars.amount(f"late_{self.stage}")
        for number, request in enumerate(view.requests):
            if peak := view.peak_from(number):
                self._add(late >= self.scale.bytes(peak) * self._absent(request.value))
        return late

    def _absent(self, value: int) -> Expression:
        """1 if the value has to be rebuilt, widened or decoded."""
        if value in self.cls.free:
            return 0
        return 1 - self.vars.stored(value)
