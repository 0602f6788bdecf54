"""What tests of trainers share: graphs of blocks, each captured once a file."""

from __future__ import annotations

import pytest

from hilore_plan.runtime.variants import Variants


@pytest.fixture(scope="module")
def variants() -> Variants:
    """Captured graphs, for runs of the same trainer with other settings."""
    return Variants()
