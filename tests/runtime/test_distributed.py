"""Two processes: gradients with a plan equal those without, under DDP and with parameters sharded by FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANKS = 2
LIMIT_SECONDS = 180
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


def test_two_ranks_are_bit_equal_with_and_without_a_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runtime.distributed_ranks"]
    # TESTS for the models; what this process imports the package from counts for the ranks as well
    path = os.pathsep.join([str(TESTS), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-3000:]
