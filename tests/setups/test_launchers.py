"""`hilore apply PLAN -- torchrun ...` and `-- accelerate launch ...`: two processes of an unchanged training script."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import plans
import pytest
import torch
from integrations.test_launcher import FAKE_TRL, save_plan
from models import FAMILIES
from setups.torchrun import RANKS, TORCHRUN, Finished, run
from setups.trl_runs import ACCUMULATION, BLOCKS, STEPS, Setup, make_model

from hilore_plan.errors import RefusedError
from hilore_plan.integrations.launcher import _raise_first_error
from hilore_plan.runtime.attach import apply

pytestmark = [pytest.mark.setups, pytest.mark.xdist_group("distributed")]

SCRIPT = str(Path(__file__).parent / "launched_grpo.py")
# Without --cpu: that starts processes by MPI only. The trainer's own use_cpu has them use gloo. accelerate 1.15 takes
# no notice of --use_fsdp on a CPU, and trains with DDP.
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS)),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)
LAUNCHERS: dict[str, Sequence[str]] = {
    "torchrun": TORCHRUN,
    "accelerate": ACCELERATE,
}
Parameters = dict[str, torch.Tensor]


def hilore_apply(plan: Path, report: Path, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "hilore_plan", "apply", str(plan), "--report", str(report), "--", *command]


def weights(done: Finished, stem: Path) -> Parameters:
    """What the ranks of a finished job ended with: all the same."""
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = (torch.load(f"{stem}.{rank}", weights_only=True) for rank in range(RANKS))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    return first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is trained, and a plan for it that treats each block and unit in another way."""
    folder = tmp_path_factory.mktemp("launched")
    model = make_model(Setup(), folder)
    llama = FAMILIES["llama"]
    with apply(model, plans.make_plan(model)) as runtime:
        llama.loss(model, llama.make_inputs(2, 9, seed=0, padding=True)).backward()
        graphs = plans.graphs_of(runtime)
    save_plan(model, folder / "plan.json", plans.choose(graphs, plans.seeded(3)))
    return folder


@pytest.fixture(scope="module")
def unplanned(folder: Path) -> Parameters:
    """Weights of a run without a plan: the same whatever has started it."""
    stem = folder / "unplanned"
    return weights(run([*TORCHRUN, SCRIPT, str(folder), str(stem)]), stem)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_trl_ends_with_the_same_weights_with_and_without_a_plan(
    folder: Path, tmp_path: Path, unplanned: Parameters, name: str
) -> None:
    command = [*LAUNCHERS[name], SCRIPT, str(folder)]
    report = tmp_path / "report.json"
    done = run(hilore_apply(folder / "plan.json", report, [*command, str(tmp_path / "planned")]))
    planned = weights(done, tmp_path / "planned")
    assert done.stdout.count("spread by MULTI_CPU") == RANKS
    assert unplanned.keys() == planned.keys()
    assert all(torch.equal(unplanned[name], planned[name]) for name in planned)
    frames = STEPS * ACCUMULATION * BLOCKS
    assert f"{frames} block forwards under the plan" in done.stderr
    processes = json.loads(report.read_text())["processes"]
    assert [process["rank"] for process in processes] == [*range(RANKS)]
    for process in processes:
        (runtime,) = process["runtimes"]
        assert runtime["frames"] == frames
        assert not runtime["fallbacks"]


TRAIN = """
import os
import torch
from torch import distributed as dist
from trl.trainer.grpo_trainer import GRPOTrainer
from hilore_plan.integrations.families import build_family
dist.init_process_group("gloo")
rank = dist.get_rank()
model = build_family("gpt2" if rank in {misfits} else "llama", dtype=torch.float32, attention="sdpa", seed=0).train()
trainer = GRPOTrainer(model)
trainer.train()
if rank == {fails}:
    raise ValueError("something of the user's own")
# the others wait for it, and would for half an hour
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, and a trainer in the place of TRL's that trains two processes in seconds."""
    trainer = tmp_path / "site" / "trl" / "trainer"
    trainer.mkdir(parents=True)
    (trainer.parent / "__init__.py").touch()
    (trainer / "__init__.py").touch()
    (trainer / "grpo_trainer.py").write_text(FAKE_TRL)
    monkeypatch.syspath_prepend(tmp_path / "site")
    save_plan(FAMILIES["llama"].build(), tmp_path / "plan.json")
    return tmp_path


def launch(job: Path, **values: object) -> Finished:
    script = job / "train.py"
    script.write_text(TRAIN.format(**{"misfits": (), "fails": -1, **values}))
    return run(hilore_apply(job / "plan.json", job / "report.json", [*TORCHRUN, str(script)]))


def test_an_error_that_hilore_raises_in_one_rank_ends_the_job_with_its_message(job: Path) -> None:
    done = launch(job, misfits=(1,))
    assert done.returncode == 2
    last = done.stderr[done.stderr.rindex("error: ") :]
    assert last.startswith("error: rank 1: the plan is for LlamaForCausalLM")
    assert "hint: " in last


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([None, "it is too large"], "rank 1: it is too large"),
        (["it is too large", "it is too large"], "it is too large"),
        (["it is small", "it is too large"], "rank 0: it is small"),
        (["it is too large"], "it is too large"),
    ],
)
def test_a_rank_is_named_where_the_others_say_something_else(messages: list[str | None], shown: str) -> None:
    errors = [message and {"type": "RefusedError", "message": message, "hint": ""} for message in messages]
    with pytest.raises(RefusedError) as caught:
        _raise_first_error([{"rank": rank, "error": error} for rank, error in enumerate(errors)])
    assert caught.value.message == shown


def test_an_error_of_the_users_own_in_one_rank_ends_the_job_with_its_code(job: Path) -> None:
    done = launch(job, fails=1)
    assert done.returncode == 1  # torchrun's own
    assert "ValueError: something of the user's own" in done.stderr
    assert "3 block forwards under the plan" in done.stderr
