"""Starts two processes under torchrun, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

RANKS = 2
LIMIT_SECONDS = 540
TESTS = Path(__file__).parents[1]
# a rendezvous of its own, at a free port: other jobs may run on this machine
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
Finished = subprocess.CompletedProcess[str]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the ranks: they import the package from where this process does, and the tests' modules."""
    path = os.pathsep.join([str(TESTS), *(entry for entry in sys.path if entry)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(extra or {})}


def torchrun(*arguments: str) -> Finished:
    """Runs a script, or `-m` and a module, in every rank."""
    return run([*TORCHRUN, *arguments])


def run(command: Sequence[str], extra: Mapping[str, str] | None = None) -> Finished:
    """Runs a command and returns what it wrote; one that hangs is an error."""
    return subprocess.run(
        command, env=environment(extra), capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
