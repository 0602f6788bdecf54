"""How a long computation tells how far it is, without knowing who listens."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Protocol, TextIO


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


class StatusLine:
    """The `Progress` of what runs inside somebody else's program: a line on a terminal about what takes its time.

    Nothing is written about what is quickly done, to a stream that is no terminal, or by any process of a distributed
    job but the first.

    Args:
        stream: where the line goes; None: standard error, whatever that is when a task begins.
        patience_seconds: how long a task may take without a word.
    """

    def __init__(self, stream: TextIO | None = None, patience_seconds: float = 1.0) -> None:
        self._stream = stream
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._running: tuple[str, TextIO, float] | None = None
        self._shown = False
        self._timer: threading.Timer | None = None

    def start(self, title: str, total: int) -> None:
        """See `Progress.start`."""
        del total
        self.finish()
        stream = sys.stderr if self._stream is None else self._stream
        if stream is None or not stream.isatty() or os.environ.get("RANK", "0") != "0":
            return
        self._running = title, stream, time.monotonic()
        self._timer = threading.Timer(self._patience_seconds, self._show)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, detail: str = "") -> None:
        """See `Progress.advance`."""

    def finish(self) -> None:
        """See `Progress.finish`."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            running, shown = self._running, self._shown
            self._running, self._shown, self._timer = None, False, None
        if running is not None and shown:
            title, stream, began_seconds = running
            stream.write(f"\r{title}: done in {time.monotonic() - began_seconds:.1f} s\n")
            stream.flush()

    def _show(self) -> None:
        with self._lock:
            if self._running is None:
                return
            title, stream, _ = self._running
            stream.write(f"{title} ...")
            stream.flush()
            self._shown = True
