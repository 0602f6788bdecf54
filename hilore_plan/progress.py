"""How a long computation tells how far it is, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What the long-running functions call; `cli.ui` draws it, `Silent` drops it."""

    def start(self, title: str, total: int) -> None:
        """A task of `total` steps begins; an unfinished earlier task is over."""

    def advance(self, detail: str = "") -> None:
        """One step is done; `detail` names what comes next."""

    def finish(self) -> None:
        """The task is over."""


class Silent:
    """The `Progress` that says nothing."""

    def start(self, title: str, total: int) -> None:
        """See `Progress.start`."""

    def advance(self, detail: str = "") -> None:
        """See `Progress.advance`."""

    def finish(self) -> None:
        """See `Progress.finish`."""
