"""The seam to verl's engine, on a stand-in for it: verl itself asks for older libraries than the other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.test_launcher import PACKAGE, save_plan
from models import FAMILIES
from plans import make_plan
from torch import nn

from hilore_plan.errors import PlanMismatchError, RefusedError
from hilore_plan.integrations.launcher import launch
from hilore_plan.integrations.verl import EngineAttachment, attach_to

CASE = FAMILIES["llama"]
Loss = Callable[[Any, Any], torch.Tensor]


class Engine:
    """What of verl's engine the plan meets."""

    def __init__(self, family: str = "llama", model_type: str = "language_model") -> None:
        self.module: nn.Module = FAMILIES[family].build()
        self.model_config = SimpleNamespace(model_type=model_type)

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        loss = loss_function(self.module, micro_batch)
        return loss, {"loss": loss.detach().item()}

    def train(self) -> dict[str, torch.Tensor]:
        for number in range(2):
            micro_batch = CASE.make_inputs(2, 9 + number, seed=number)
            loss, _ = self.forward_step(micro_batch, loss_function=CASE.loss, forward_only=False)
            loss.backward()
        return {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}


@pytest.fixture
def attachment() -> Iterator[EngineAttachment]:
    attachment = attach_to(Engine, make_plan(CASE.build()))
    yield attachment
    attachment.undo()


def test_a_planned_engine_has_the_same_gradients(attachment: EngineAttachment) -> None:
    planned = Engine()
    got = planned.train()
    assert [report.frames for report in attachment.reports] == [6]
    attachment.undo()
    want = Engine().train()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_only_training_of_language_models_is_planned(attachment: EngineAttachment) -> None:
    engine = Engine()
    with torch.no_grad():
        engine.forward_step(CASE.make_inputs(2, 9, seed=0), loss_function=CASE.loss, forward_only=True)
    engine.module.eval()
    engine.train()
    Engine(model_type="value_model").train()
    assert attachment.reports == []


def test_undo_restores_the_class_and_the_modules(attachment: EngineAttachment) -> None:
    engine = Engine()
    engine.train()
    attachment.undo()
    assert Engine.forward_step.__name__ == "forward_step"
    assert not hasattr(Engine.forward_step, "__wrapped__")
    assert all("forward" not in vars(layer) for layer in engine.module.model.layers)


@pytest.mark.usefixtures("attachment")
def test_another_model_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="the plan is for LlamaForCausalLM"):
        Engine("gpt2").train()


def test_a_class_without_a_forward_step_is_refused() -> None:
    class Other(Engine):
        pass

    with pytest.raises(RefusedError, match="Other defines no forward_step") as caught:
        attach_to(Other, make_plan(CASE.build()))
    assert "verl" in caught.value.hint


FAKE_VERL = """
import os, sys
sys.path.insert(0, {tests!r})
from integrations.test_verl import Engine as FSDPEngineWithLMHead
FSDPEngineWithLMHead.__name__ = "FSDPEngineWithLMHead"
"""
SCRIPT = """
{first}
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
FSDPEngineWithLMHead().train()
print(hasattr(FSDPEngineWithLMHead.forward_step, "__wrapped__"))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """A training command that imports an engine from where verl has its own."""
    folder = tmp_path / "site" / "verl" / "workers" / "engine" / "fsdp"
    folder.mkdir(parents=True)
    (folder / "transformer_impl.py").write_text(FAKE_VERL.format(tests=str(Path(__file__).parents[1])))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), PACKAGE]))
    save_plan(CASE.build(), tmp_path / "plan.json")

    def write(first: str) -> list[str]:
        (tmp_path / "train.py").write_text(SCRIPT.format(first=first))
        return [sys.executable, str(tmp_path / "train.py")]

    return write


def test_hilore_apply_puts_the_plan_into_the_engine(
    script: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path / "plan.json", script("")) == 0
    out, err = capfd.readouterr()
    assert out == "True\n"
    assert "6 block forwards under the plan" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"check_every": 2}, "--check-every is for TRL's trainers"),
        ({"regroup": ["rows"]}, "--regroup is for TRL's trainers"),
        ({"regroup": ["silent"]}, "--leave-out-silent is for TRL's trainers"),
    ],
)
def test_what_only_trainers_do_is_refused(
    script: Callable[[str], list[str]], tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusedError, match=said):
        launch(tmp_path / "plan.json", script(""), **options)


def test_another_model_is_told_by_the_launcher(
    script: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_plan(FAMILIES["gpt2"].build(), tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="the plan is for GPT2LMHeadModel"):
        launch(tmp_path / "plan.json", script(""))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("planned", [True, False])
def test_the_plug_in_alone_does_so_where_the_environment_names_a_plan(
    script: Callable[[str], list[str]], tmp_path: Path, planned: bool
) -> None:
    """As in Ray's workers on a cluster, which no launcher has started: verl imports its plug-ins."""
    command = script("import hilore_plan.integrations.verl_plugin")
    environment = {**os.environ, "HILORE_PLAN": str(tmp_path / "plan.json")} if planned else dict(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{planned}\n"
