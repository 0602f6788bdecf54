"""What tests of the runtime share: one store of captured graphs, and a way to attach that detaches again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runtime.rig import Attach, HandleLog, Shared


@pytest.fixture(scope="session")
def shared() -> Shared:
    """The graphs of all blocks that any of these tests runs: each is captured once."""
    return Shared()


@pytest.fixture
def attach(shared: Shared) -> Iterator[Attach]:
    attach = Attach(shared)
    yield attach
    attach.detach_all()


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[HandleLog]:
    """Every handle that a planned forward gives to autograd, while the test asks for it."""
    log = HandleLog(monkeypatch)
    yield log
    log.clear()
