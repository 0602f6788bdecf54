"""What tests of the runtime share: a log of what its hooks give to autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runtime.rig import HandleLog


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[HandleLog]:
    """Every handle that a planned forward gives to autograd, while the test asks for it."""
    log = HandleLog(monkeypatch)
    yield log
    log.clear()
