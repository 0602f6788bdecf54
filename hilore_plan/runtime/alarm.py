"""The way out of a frame that compressed more than its micro-batch allows."""

from __future__ import annotations

import torch

from hilore_plan.runtime.frame import Owner


class Alarm:
    """Raised when a micro-batch turns out riskier than the entry that its frames were made for.

    While it is `open` nothing is decided for good: backward passes with and without it may follow each other.
    """

    __slots__ = ("open", "raised")

    def __init__(self) -> None:
        self.open = False
        self.raised = False


class Careful:
    """An owner with a way out: once the alarm is raised, slots are rebuilt exactly and what was compressed is ignored.

    The alarm is raised before backward reaches a block, if ever, so the way out is forgotten at the first request.
    """

    __slots__ = ("alarm", "exact", "owner")

    def __init__(self, owner: Owner, exact: Owner, alarm: Alarm) -> None:
        self.owner: Owner | None = owner
        self.exact: Owner | None = exact
        self.alarm = alarm

    def take(self, slot: int) -> torch.Tensor:
        """See `Owner.take`."""
        if self.owner is not None and self.exact is not None:
            if self.alarm.open:
                return (self.exact if self.alarm.raised else self.owner).take(slot)
            if self.alarm.raised:  # R11
                self.owner = None  # R5
            else:
                self.exact = None
        chosen = self.owner or self.exact
        assert chosen is not None
        return chosen.take(slot)
