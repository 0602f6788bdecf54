"""What compression makes inexact, and where that is not allowed.

A value rebuilt from an inexact one is inexact, too. Some ops keep an output that only fits their exact inputs
(attention keeps the log-sum-exp of exact q and k), and every frame has to be able to rebuild itself exactly after all.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from hilore_plan.errors import HiloreError
from hilore_plan.planner.block_view import ClassView
from hilore_plan.schema.plan import Action, codec_of


class UnrecoverableError(HiloreError):
    """Actions under which a saved tensor can neither be found nor be rebuilt."""


class InexactError(UnrecoverableError):
    """Actions under which a compressed value would spoil more than it may."""


def check_compression(
    cls: ClassView, kept: Mapping[int, Action], ran: Container[int], needs: Sequence[Sequence[int]]
) -> None:
    """Refuse compression that leaves no way back, or that reaches what has to be exact.

    Args:
        cls: the class of the block.
        kept: the action on each value that is kept.
        ran: the ops that run again in backward.
        needs: for each value, the stages of backward that need it.

    Raises:
        InexactError: naming the value.
    """
    coded = {value for value, action in kept.items() if codec_of(action) is not None}
    if not coded:
        return
    lost = sorted(cls.inputs - kept.keys())
    if lost:
        raise InexactError(f"{cls.name}: with anything compressed, {cls.names[lost[0]]} has to be kept")
    inexact = _spread(cls, coded, kept, ran)
    for op in cls.ops:
        if not any(value in kept and cls.slots[value] for value in op.outputs):
            continue
        for value in op.exact_inputs:
            if value in inexact and needs[value]:
                raise InexactError(
                    f"{cls.name}: {cls.names[value]} has to be exact, for an output of {op.name} is kept"
                )


def _spread(cls: ClassView, coded: set[int], kept: Mapping[int, Action], ran: Container[int]) -> set[int]:
    """The values that are inexact in backward."""
    inexact = set(coded)
    for number, op in enumerate(cls.ops):
        if number in ran and not inexact.isdisjoint(op.inputs):
            inexact.update(value for value in op.outputs if value not in kept)
    return inexact
