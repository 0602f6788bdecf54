"""The part of the integer program that describes one block: see the maths at the head of `ilp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import pulp

from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.ilp_common import add_common
from hilore_plan.planner.ilp_solver import Constraint, Expression, Program, Scale
from hilore_plan.planner.ilp_stage import StageProgram
from hilore_plan.planner.ilp_variables import Coded, Variables
from hilore_plan.planner.patterns import Pattern
from hilore_plan.planner.timeline import View
from hilore_plan.schema.plan import Action, codec_of

CERTAIN = 0.5  # solvers give binaries to within a tolerance


@dataclass(frozen=True)
class BlockProgram:
    """The variables of one block, and its bytes and seconds as expressions of them in the solver's units.

    `held` are the bytes in forward, and in each stage of backward.
    """

    cls: ClassView
    store: dict[int, Expression]
    coded: dict[int, list[Coded]]
    kept: Expression
    held: list[Expression]
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
        self.vars = Variables(problem, self.cls, prefix)
        self.ways = [self.vars]
        if any(self.vars.compressed(unit) for unit in self.vars.forms):
            self.ways.append(Variables(problem, self.cls, f"{prefix}x", self.vars))
        self.inexact = {value: self.vars.share(f"i{value}") for value in _spoiling(self.cls, self.vars.useful)}

    def build(self) -> BlockProgram:
        """All constraints, then the expressions."""
        for unit in self.cls.units:
            self._choose(unit)
        for way in self.ways:
            for value in range(len(self.cls.names)):
                self._serve_slots(way, value)
            for op in way.useful:
                self._run(way, op)
        self._keep_exact()
        kept = pulp.lpSum(self.vars.kept_bytes(value, self.scale) for value in range(len(self.cls.names)))
        held = [self._forward(kept), *(self._stage(stage) for stage in self.vars.stages)]
        return BlockProgram(self.cls, self.vars.store, self.vars.coded, kept, held, self._seconds())

    def _add(self, constraint: Constraint) -> None:
        self.problem.addConstraint(constraint)

    # constraints

    def _choose(self, unit: int) -> None:
        if unit in self.cls.forced:
            self._add(self.vars.held(unit) == 1)
        elif unit in self.vars.coded:
            self._add(self.vars.held(unit) <= 1)

    def _serve_slots(self, way: Variables, value: int) -> None:
        slots = self.cls.slots[value]
        if slots and value in way.wanted:
            self._add(way.wanted[value][slots[0]] + way.held(value) >= 1)

    def _run(self, way: Variables, op: int) -> None:
        view = self.cls.ops[op]
        for stage in way.stages:
            ran = way.ran[op][stage]
            if stage < way.last:
                self._add(ran <= way.ran[op][stage + 1])
            for value in sorted(set(view.inputs) - self.cls.free):
                there = way.wanted[value][stage] if value in way.wanted else 0
                self._add(ran <= there + way.held(value))
            if len(view.outputs) > 1:
                self._add(ran <= pulp.lpSum(way.wanted[value][stage] for value in view.outputs))
            for value in view.outputs:
                self._want(way, op, value, stage)

    def _want(self, way: Variables, op: int, value: int, stage: int) -> None:
        """Nothing is wanted before its time: the runtime is lazy, so the program must not run ahead of it."""
        wanted = way.wanted[value][stage]
        if way.can_hold(value):
            self._add(wanted <= 1 - way.held(value))
        if len(self.cls.ops[op].outputs) > 1:
            self._add(wanted <= way.ran[op][stage])
            if stage < way.last:  # what was wanted once counts at the end, where inexactness asks for it
                self._add(wanted <= way.wanted[value][stage + 1])
        slots = self.cls.slots[value]
        if not slots or slots[0] > stage:
            self._add(wanted <= pulp.lpSum(way.ran[reader][stage] for reader in way.readers(value)))

    def _keep_exact(self) -> None:
        """The way back from compression, and what it must not reach; nothing is written where nothing compresses."""
        coded = {value: sum(found) for value in self.vars.forms if (found := self.vars.compressed(value))}
        for value, compressed in coded.items():
            for needed in sorted(self.cls.inputs - self.cls.forced):
                self._add(compressed <= self.vars.held(needed))
            if value in self.inexact:
                self._add(self.inexact[value] >= compressed)
        for number in self.vars.useful:
            for value, source in product(self.cls.ops[number].outputs, sorted(set(self.cls.ops[number].inputs))):
                if value in self.inexact and source in self.inexact:
                    rebuilt = self.vars.wanted[value][self.vars.last]
                    self._add(self.inexact[value] >= self.inexact[source] + rebuilt - 1)
        for op in self.cls.ops:
            kept = [value for value in op.outputs if self.cls.slots[value] and self.vars.can_hold(value)]
            for value, source in product(kept, op.exact_inputs):
                if source in self.inexact:
                    self._add(self.inexact[source] + self.vars.held(value) <= 1)

    # expressions

    def _forward(self, kept: Expression) -> Expression:
        """What the block holds while its forward runs; see `ForwardView`."""
        view = self.cls.forward
        if view is None:
            return kept + self.scale.bytes(self.cls.forward_working_bytes)
        most = self.vars.amount("forward")
        for moment in view.moments:
            own = [self.vars.whole_bytes(value, self.scale) for value in moment.gone]
            own += [self.vars.coded_bytes(value, self.scale) for value in moment.saved]
            self._add(most >= pulp.lpSum(own) + self.scale.bytes(view.input_bytes + moment.peak_bytes))
        return most

    def _stage(self, stage: int) -> Expression:
        """What the block holds in a stage, whichever way it has to go."""
        common = add_common(self.problem, self.ways, self.scale, stage)
        planned, *others = [StageProgram(self.problem, way, common, self.scale, stage).bytes() for way in self.ways]
        for other in others:
            self._add(planned >= other)
        return planned

    def _seconds(self) -> Expression:
        micro, unit = self.view.micro_batches, self.scale.second_unit
        scale = micro * self.view.recompute_scale / unit
        ops = [scale * self.cls.ops[op].seconds * self.vars.ran[op][self.vars.last] for op in self.vars.useful]
        coded = [
            micro / unit * form.seconds * variable for forms in self.vars.coded.values() for form, variable in forms
        ]
        return pulp.lpSum(ops + coded)


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
