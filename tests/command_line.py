"""What a command line comes to, for the tests that run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Exit code, and what was written to stdout and stderr."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
