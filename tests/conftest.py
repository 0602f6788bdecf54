"""Fixtures for all tests: what must hold after each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

# the models of tests are too small for more threads: waiting for each other costs them more than they save
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from runtime.rig import Attach, Shared

settings.register_profile("steady", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test may leave a saved-tensor hook or a live frame: the next backward would run through it."""
    yield
    if "torch" in sys.modules:
        assert _top_hooks() is None, "a saved-tensor hook was left behind"
    if "hilore_plan.runtime.frame" in sys.modules:
        assert _live_frames() == 0, "a frame was left alive"


# the rig brings torch along, which tests of the planner and the files do without


@pytest.fixture(scope="session")
def shared() -> Shared:
    """The graphs of all blocks that any test of the runtime runs: each is captured once."""
    from runtime.rig import Shared

    return Shared()


@pytest.fixture
def attach(shared: Shared) -> Iterator[Attach]:
    """Attaches plans, and detaches what is left attached."""
    from runtime.rig import Attach

    attach = Attach(shared)
    yield attach
    attach.detach_all()


def _top_hooks() -> object | None:
    """The innermost pair of saved-tensor hooks, or None. torch offers no public question for it."""
    import torch

    hooks: object | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _live_frames() -> int:
    import gc

    from hilore_plan.runtime.frame import live_frames

    if live_frames():
        gc.collect()  # a graph that a failed test holds in a traceback's cycle is not a leak of ours
    return live_frames()
