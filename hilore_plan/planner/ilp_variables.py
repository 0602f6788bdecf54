"""The variables of one block in the integer program, and what is said of a value in terms of them.

Names as in the table of `ilp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from hilore_plan.planner.block_view import ClassView, Form
from hilore_plan.planner.ilp_solver import Expression, Program, Scale
from hilore_plan.schema.plan import codec_of

Coded = tuple[Form, Expression]


class Variables:
    """One block's variables, added to a problem under names that begin with `prefix`.

    With `planned` they are those of the way back, on which what is compressed counts as missing and is rebuilt exactly.
    What is kept is decided by the variables of the planned way; `coded` are the forms that are read.
    """

    def __init__(self, problem: Program, cls: ClassView, prefix: str, planned: Variables | None = None) -> None:
        self.problem, self.cls, self.prefix = problem, cls, prefix
        self.stages = range(cls.stages)
        self.last = cls.stages - 1
        self.useful = _useful(cls)
        if planned is None:
            self.store = {unit: self.binary(f"s{unit}") for unit in cls.units}
            self.forms = {unit: self._forms(unit) for unit in cls.units if cls.forms[unit]}
            self.coded = self.forms
        else:
            self.store, self.forms = planned.store, planned.forms
            plain = {unit: [each for each in forms if not _compresses(each)] for unit, forms in self.forms.items()}
            self.coded = {unit: forms for unit, forms in plain.items() if forms}
        self.ran = {op: [self.share(f"r{op}_{stage}") for stage in self.stages] for op in self.useful}
        self.wanted = {value: self._wanted(op, value) for op in self.useful for value in cls.ops[op].outputs}

    def binary(self, name: str) -> Expression:
        """A new variable that is 0 or 1."""
        return self.problem.add_variable(self.prefix + name, 0, 1, pulp.LpBinary)

    def share(self, name: str) -> Expression:
        """A new variable between 0 and 1."""
        return self.problem.add_variable(self.prefix + name, 0, 1)

    def amount(self, name: str) -> Expression:
        """A new variable that is not negative."""
        return self.problem.add_variable(self.prefix + name, 0)

    def _forms(self, unit: int) -> list[Coded]:
        """A binary for each form; the first letter of a name goes on with what tells the codecs apart."""
        codecs = [(form, codec_of(form.action)) for form in self.cls.forms[unit]]
        return [(form, self.binary(f"c{unit}_{codec}" if codec else f"c{unit}")) for form, codec in codecs]

    def _wanted(self, op: int, value: int) -> list[Expression]:
        if len(self.cls.ops[op].outputs) == 1:
            return self.ran[op]  # an op with one output runs when that output is wanted
        return [self.share(f"d{value}_{stage}") for stage in self.stages]

    def stored(self, value: int) -> Expression:
        """1 if the value is kept as it is."""
        return self.store.get(value, 1 if value in self.cls.forced else 0)

    def held(self, value: int) -> Expression:
        """1 if the value is kept in any form that is read."""
        return self.stored(value) + sum(variable for _, variable in self.coded.get(value, ()))

    def compressed(self, value: int) -> list[Expression]:
        """The binaries of a value's codecs."""
        return [each[1] for each in self.forms.get(value, ()) if _compresses(each)]

    def can_hold(self, value: int) -> bool:
        """Whether the value can be kept at all."""
        return value in self.store or value in self.cls.forced

    def kept_bytes(self, value: int, scale: Scale) -> Expression:
        """Bytes that are kept of a value from forward on."""
        return self.whole_bytes(value, scale) + self.coded_bytes(value, scale)

    def whole_bytes(self, value: int, scale: Scale) -> Expression:
        """Those of it as it is."""
        if value in self.cls.free:
            return 0
        return scale.bytes(self.cls.value_bytes[value]) * self.stored(value)

    def coded_bytes(self, value: int, scale: Scale) -> Expression:
        """Those of it in another form."""
        if value in self.cls.free:
            return 0
        return sum(scale.bytes(form.bytes) * variable for form, variable in self.forms.get(value, ()))

    def readers(self, value: int) -> list[int]:
        """The ops that may run again and read the value, in order."""
        return [op for op in self.cls.readers[value] if op in self.ran]

    def before(self, op: int, stage: int) -> Expression:
        """1 if the op has run before this stage."""
        return self.ran[op][stage - 1] if stage else 0

    def now(self, op: int, stage: int) -> Expression:
        """1 if the op runs in this stage."""
        return self.ran[op][stage] - self.before(op, stage)

    def later(self, op: int, stage: int) -> Expression:
        """1 if the op runs in this stage or a later one."""
        return self.ran[op][self.last] - self.before(op, stage)

    def laters(self, value: int, stage: int) -> list[Expression]:
        """For each op that reads the value: 1 if it runs in this stage or a later one; nothing after the last stage."""
        return [self.later(reader, stage) for reader in self.readers(value)] if stage <= self.last else []

    def any(self, name: str, cases: Sequence[Expression]) -> Expression:
        """A variable that is at least each of the cases; minimising bytes or meeting a limit makes it the largest."""
        if not cases:
            return 0
        largest = self.share(name)
        for case in cases:
            self.problem.addConstraint(largest >= case)
        return largest


def _compresses(coded: Coded) -> bool:
    return codec_of(coded[0].action) is not None


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
