"""`launch`: exit codes, signals, reports, and what is said when the plan wasn't used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from models import FAMILIES
from plans import loadable, make_plan
from torch import nn

import hilore_plan
from hilore_plan.errors import FileError, PlanMismatchError, UsageError
from hilore_plan.integrations import smollm2
from hilore_plan.integrations.families import build_family
from hilore_plan.integrations.launcher import launch
from hilore_plan.schema.io import save
from hilore_plan.schema.plan import Action

Actions = Sequence[Mapping[str, Action]]
PACKAGE = str(Path(hilore_plan.__file__).parents[1])

# A trainer in the place of TRL's, so that most tests need no TRL.
FAKE_TRL = """
import torch
from types import SimpleNamespace

class GRPOTrainer:
    def __init__(self, model):
        self.model = model
        self.args = SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().logsumexp(-1).sum()

    def train(self):
        ids = torch.arange(3, 23).reshape(2, 10)
        self._compute_loss(self.model, {"prompt_ids": ids[:, :4], "completion_ids": ids[:, 4:]}).backward()
"""
FAKE_SFT = """
from trl.trainer.grpo_trainer import GRPOTrainer

class SFTTrainer(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"]).logits.float().logsumexp(-1).sum()

    def _compute_loss(self):
        raise AssertionError("this is not GRPO's")

    def train(self):
        import torch
        inputs = {"input_ids": torch.arange(3, 23).reshape(2, 10)}
        self.compute_loss(self.model, inputs, num_items_in_batch=1).backward()
"""
TRAIN = """
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from hilore_plan.integrations.families import build_family
GRPOTrainer(build_family("{family}", dtype=torch.float32, attention="sdpa", seed=0).train()).train()
print("trained")
{then}
"""


def save_plan(model: nn.Module, path: Path, actions: Actions | None = None) -> None:
    """A plan with the given actions per block, or one that recomputes everything, as a file."""
    save(loadable(make_plan(model, actions)), path)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(FAMILIES["llama"].build(), path)
    return path


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Children find the package under test, and a stand-in for TRL in front of the real one."""
    trainer = tmp_path / "site" / "trl" / "trainer"
    trainer.mkdir(parents=True)
    (trainer.parent / "__init__.py").touch()
    (trainer / "__init__.py").touch()
    (trainer / "grpo_trainer.py").write_text(FAKE_TRL)
    (trainer / "sft_trainer.py").write_text(FAKE_SFT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), PACKAGE]))


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


@pytest.mark.parametrize(("body", "code"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_the_exit_code_passes_through(plan: Path, tmp_path: Path, body: str, code: int) -> None:
    assert launch(plan, script(tmp_path, body)) == code


def test_a_signal_that_ends_the_command_becomes_its_code(plan: Path, tmp_path: Path) -> None:
    command = script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert launch(plan, command) == 128 + signal.SIGKILL


def test_a_command_without_a_trainer_is_told_so(plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(plan, script(tmp_path, "print('hello')")) == 0
    out, err = capfd.readouterr()
    assert out == "hello\n"
    assert "never built a trainer that hilore knows (TRL's GRPOTrainer, SFTTrainer or DPOTrainer)" in err


def test_a_trainer_that_never_trains_is_told_apart(
    plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(plan, script(tmp_path, "import trl.trainer.grpo_trainer")) == 0
    assert "no GRPOTrainer ran a training step" in capfd.readouterr().err


def test_a_python_without_the_package_is_named(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "site" / "hilore_plan"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not here')")
    assert launch(plan, script(tmp_path, "print('hello')")) == 0
    out, err = capfd.readouterr()
    assert out == "hello\n"
    assert f"{sys.executable} cannot import hilore_plan" in err


def test_a_training_command_runs_under_the_plan_and_reports(
    plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert launch(plan, script(tmp_path, TRAIN.format(family="llama", then="raise SystemExit(3)")), report) == 3
    out, err = capfd.readouterr()
    assert out == "trained\n"
    assert "3 block forwards under the plan" in err
    [process] = json.loads(report.read_text())["processes"]
    assert process["runtimes"][0]["frames"] == 3
    assert process["error"] is None


def test_trainers_of_both_kinds_run_under_one_plan_on_one_model(
    plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    then = """
from trl.trainer.sft_trainer import SFTTrainer
model = build_family("llama", dtype=torch.float32, attention="sdpa", seed=0).train()
SFTTrainer(model).train()
GRPOTrainer(model).train()
"""
    assert launch(plan, script(tmp_path, TRAIN.format(family="llama", then=then)), report) == 0
    [process] = json.loads(report.read_text())["processes"]
    assert process["trainers"] == ["GRPOTrainer", "SFTTrainer"]
    assert [runtime["frames"] for runtime in process["runtimes"]] == [3, 6]


def test_a_plan_for_another_model_is_one_error_and_no_traceback(
    plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        launch(plan, script(tmp_path, TRAIN.format(family="gpt2", then="")))
    assert caught.value.exit_code == 2
    assert caught.value.hint
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_the_command_line_shows_a_mismatch_in_one_line(plan: Path, tmp_path: Path) -> None:
    command = script(tmp_path, TRAIN.format(family="gpt2", then=""))
    done = subprocess.run(
        [sys.executable, "-m", "hilore_plan", "apply", str(plan), "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the plan is for LlamaForCausalLM")
    assert "\n\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_another_sitecustomize_still_runs(plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site" / "sitecustomize.py").write_text("print('theirs', __name__)")
    launch(plan, script(tmp_path, "import sitecustomize; print(sitecustomize.__file__)"))
    assert capfd.readouterr().out == f"theirs sitecustomize\n{tmp_path / 'site' / 'sitecustomize.py'}\n"


def test_grandchildren_inherit_the_plan(plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "inner.py").write_text(textwrap.dedent(TRAIN.format(family="llama", then="")))
    command = script(
        tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'inner.py')!r}])"
    )
    assert launch(plan, command) == 0
    assert "3 block forwards under the plan" in capfd.readouterr().err


def test_the_malloc_settings_arrive_and_the_users_own_stay(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "123456")
    body = "import os; print(os.environ['MALLOC_MMAP_THRESHOLD_'], os.environ['MALLOC_TRIM_THRESHOLD_'])"
    launch(plan, script(tmp_path, body))
    assert capfd.readouterr().out == f"{4 * 2**30} 123456\n"


def test_a_signal_reaches_the_command(plan: Path, tmp_path: Path) -> None:
    body = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        print("ready", flush=True)
        time.sleep(60)
    """
    starter = f"from hilore_plan.integrations.launcher import launch; raise SystemExit(launch({str(plan)!r}, %r))"
    outer = subprocess.Popen(
        [sys.executable, "-c", starter % script(tmp_path, body)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    with outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == b"ready\n"
        time.sleep(0.1)  # the launcher installs its handlers right after it has started the child
        outer.send_signal(signal.SIGTERM)
        assert outer.wait(timeout=30) == 42


def test_bad_commands_and_files_are_named(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no command"):
        launch(plan, [])
    with pytest.raises(UsageError, match="command not found: no-such-program-here"):
        launch(plan, ["no-such-program-here"])
    with pytest.raises(FileError):
        launch(tmp_path / "missing.json", ["true"])
    with pytest.raises(FileError, match="cannot write"):
        launch(plan, ["true"], tmp_path / "no" / "such" / "folder.json")


REAL = """
import hashlib, sys, warnings
warnings.simplefilter("ignore")
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
config = GRPOConfig(
    output_dir=sys.argv[2], max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_generations=4, max_completion_length=6, learning_rate=1e-3, bf16=False, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, gradient_checkpointing=True, seed=0,
)
trainer = GRPOTrainer(
    model=model, args=config, processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
    reward_funcs=lambda completions, **_: [len(text) % 7 / 7 for text in completions],
    train_dataset=Dataset.from_list([{"prompt": "Two and two " * (i % 3 + 1)} for i in range(16)]),
)
trainer.train()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
"""


def test_the_real_trainer_ends_with_the_same_weights_with_and_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoTokenizer

    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = AutoTokenizer.from_pretrained(smollm2.model_directory())
    model = build_family("llama", dtype=torch.float32, attention="sdpa", seed=0, vocab_size=len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    save_plan(model.train(), tmp_path / "real.json")
    command = [*script(tmp_path, REAL), str(tmp_path / "model"), str(tmp_path / "out")]
    subprocess.run(command, check=True)
    plain = weights_line(capfd.readouterr().out)
    assert launch(tmp_path / "real.json", command) == 0
    out, err = capfd.readouterr()
    assert weights_line(out) == plain
    assert "12 block forwards under the plan" in err  # 3 blocks, 2 micro-batches, 2 steps
    assert "fell back" not in err


def weights_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("weights"))
