"""The way out of a frame that compressed more than its micro-batch allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hilore_plan.runtime.frame import Owner, Stage


class Alarm:
    """Raised when a micro-batch turns out riskier than the entry that its frames were made for.

    While it is `open` nothing is decided for good: backward passes with and without it may follow each other.
    """

    __slots__ = ("open", "raised")

    def __init__(self) -> None:
        self.open = False
        self.raised = False


class Ways:
    """The two ways in which a frame's values come back: as planned, and exactly.

    The alarm is raised before backward reaches a block, if ever, so the first request decides for the whole frame, and
    what only the other way would have read is let go of.
    """

    __slots__ = ("_alarm", "_exact", "_exactly", "_planned")

    def __init__(self, alarm: Alarm, planned: Sequence[Stage | None], exact: Sequence[Stage | None]) -> None:
        self._alarm = alarm
        self._planned = planned
        self._exact = exact
        self._exactly: bool | None = None

    def exactly(self) -> bool:
        """Whether it is the exact one."""
        if self._exactly is None and not self._alarm.open:
            self._exactly = self._alarm.raised  # R11
            for stage in self._planned if self._exactly else self._exact:
                if stage is not None:
                    stage.let_go()
            self._planned = self._exact = ()  # R5
        return self._alarm.raised if self._exactly is None else self._exactly

    @property
    def decided(self) -> bool:
        """Whether it stays so."""
        return self._exactly is not None


class Careful:
    """An owner with a way out, for when the alarm is raised: then what was compressed is ignored."""

    __slots__ = ("_ways", "exact", "owner")

    def __init__(self, owner: Owner, exact: Owner, ways: Ways) -> None:
        self.owner: Owner | None = owner
        self.exact: Owner | None = exact
        self._ways = ways

    def take(self, slot: int) -> torch.Tensor:
        """See `Owner.take`."""
        exactly = self._ways.exactly()
        chosen = self.exact if exactly else self.owner
        if self._ways.decided:
            self.owner, self.exact = (None, chosen) if exactly else (chosen, None)  # R5
        assert chosen is not None
        return chosen.take(slot)
