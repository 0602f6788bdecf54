"""`hilore apply` with a command that trains with each of TRL's trainers that hilore knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integrations.test_launcher import save_plan
from setups.trl_runs import ACCUMULATION, BLOCKS, MARKS, STEPS, Setup, make_model

import hilore_plan
from hilore_plan.integrations.launcher import launch

pytestmark = MARKS

SCRIPT = """
import hashlib, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from setups.trl_runs import Setup, make_dpo, make_grpo, make_sft, parameters_of

for make in (make_sft, make_dpo, make_grpo):
    trainer = make(Setup(), Path(sys.argv[1]))
    torch.manual_seed(1)
    trainer.train()
    weights = b"".join(p.numpy().tobytes() for p in parameters_of(trainer).values())
    print("weights", type(trainer).__name__, hashlib.sha256(weights).hexdigest())
"""


def weights(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("weights")]


def test_every_known_trainer_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    places = [str(Path(hilore_plan.__file__).parents[1]), str(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_plan(make_model(Setup(), tmp_path), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    plain = weights(capfd.readouterr().out)
    assert launch(tmp_path / "plan.json", command, tmp_path / "report.json") == 0
    assert weights(capfd.readouterr().out) == plain
    assert len(plain) == 3
    [process] = json.loads((tmp_path / "report.json").read_text())["processes"]
    assert set(process["trainers"]) >= {"GRPOTrainer", "SFTTrainer", "DPOTrainer"}
    assert [report["frames"] for report in process["runtimes"]] == [STEPS * ACCUMULATION * BLOCKS] * 3
    assert not any(report["fallbacks"] for report in process["runtimes"])
