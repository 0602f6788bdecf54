"""A progress for tests."""

from __future__ import annotations


class Recorder:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, title: str, total: int) -> None:
        self.told.append(f"{title} {total}")

    def advance(self, detail: str = "") -> None:
        self.told.append(detail)

    def finish(self) -> None:
        self.told.append("done")
