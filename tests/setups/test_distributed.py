"""DDP and FSDP2 with two processes under torchrun: nothing differs from the same run without a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from setups.distributed_fails import UNLUCKY
from setups.distributed_setups import RANKS, SETUPS
from setups.torchrun import Finished, torchrun

pytestmark = pytest.mark.setups


def kind_of(name: str) -> str:
    return name.partition("-")[0]


class Jobs:
    """Runs all setups of one kind in one job, once: starting two processes takes longer than most of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Finished] = {}

    def outcome(self, name: str) -> str:
        """What went wrong in a setup; empty if nothing did."""
        kind = kind_of(name)
        if kind not in self._done:
            names = [other for other in SETUPS if kind_of(other) == kind]
            self._done[kind] = torchrun("-m", "setups.distributed_runs", str(self._folder), *names)
        results = [self._folder / f"{name}.{rank}" for rank in range(RANKS)]
        if not all(result.exists() for result in results):
            return "not reached: " + self._done[kind].stderr[-3000:]
        return "".join(result.read_text() for result in results)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("ranks"))


@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize("name", SETUPS)
def test_gradients_parameters_and_collectives_are_those_of_a_run_without_a_plan(jobs: Jobs, name: str) -> None:
    if trouble := jobs.outcome(name):
        pytest.fail(trouble, pytrace=False)


@pytest.mark.xdist_group("distributed")
def test_an_error_in_one_rank_ends_the_job_with_its_message() -> None:
    """The other waits for it in a collective, and would for half an hour."""
    done = torchrun("-m", "setups.distributed_fails")
    assert done.returncode == 1
    messages = [line for line in done.stderr.splitlines() if "RecoveryError" in line and "modified in place" in line]
    assert any(line.startswith(f"[rank{UNLUCKY}]") for line in messages), done.stderr[-3000:]
    assert not any(line.startswith("[rank0]") for line in messages)
