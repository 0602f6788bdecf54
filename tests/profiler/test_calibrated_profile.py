"""Profiles with codecs: bytes and seconds beside each value, risk for each unit, and text to calibrate on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import Plain, Stack

from hilore_plan.cli.options import read_options
from hilore_plan.codecs.registry import find
from hilore_plan.errors import CodecError, FileError, UsageError
from hilore_plan.integrations.builtin_models import LoadedModel, build
from hilore_plan.integrations.calibration_text import COMPLETION_TOKENS, arithmetic_prompts, calibration_text
from hilore_plan.integrations.profile_source import profile_model
from hilore_plan.profiler import profile as profile_file
from hilore_plan.profiler.batches import GROUP, ROWS
from hilore_plan.profiler.profile import profile_module
from hilore_plan.profiler.step import MicroBatch
from hilore_plan.schema.io import load_profile, save
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Workload

CODECS = ("int8", "int4")
pytestmark = pytest.mark.filterwarnings("ignore::hilore_plan.profiler.recompute_scale.NoisyMeasurementWarning")


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "ROUNDS", 1)


def profiled(**changes: Any) -> Profile:
    sizes = {"batch": 2, "prompt_tokens": 4, "response_tokens": 12, "token_points": 1, "dtype": "bfloat16"}
    return profile_model("builtin:tiny-llama", **{**sizes, "codecs": CODECS, "calibration_microbatches": 8, **changes})


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled()


def test_a_calibrated_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    save(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert profile.codecs == CODECS
    assert profile.risk is not None
    assert profile.risk.source.startswith("random tokens")


def test_codecs_take_the_units_that_have_a_risk(profile: Profile) -> None:
    assert profile.risk is not None
    ((block_class,), (units,)) = profile.classes, profile.risk.units
    (measure,) = profile.points[0].classes
    for codec in CODECS:
        taken = {v.name for v, count in zip(block_class.values, measure.codec_bytes[codec], strict=True) if count}
        assert taken == {unit.unit for unit in units if unit.codec == codec}
        assert all(len(unit.local) == len(unit.propagated) == len(block_class.blocks) for unit in units)
        seconds = measure.codec_seconds[codec]
        assert all((s > 0) == (count > 0) for s, count in zip(seconds, measure.codec_bytes[codec], strict=True))


def test_coded_bytes_are_the_codecs_own(profile: Profile) -> None:
    (block_class,), (measure,) = profile.classes, profile.points[0].classes
    place = [value.name for value in block_class.values].index("mlp.gate_proj")
    elements = measure.value_bytes[place] // torch.bfloat16.itemsize
    for codec in CODECS:
        assert measure.codec_bytes[codec][place] == find(codec).bytes_for(elements, torch.bfloat16)


def test_attention_needs_its_q_and_k_exact(profile: Profile) -> None:
    (block_class,) = profile.classes
    exact = {op.name: {block_class.values[i].name for i in op.exact_inputs} for op in block_class.ops}
    assert exact.pop("self_attn.sdpa") == {"self_attn.add", "self_attn.add.2"}
    assert not any(exact.values())


def test_without_codecs_there_is_no_risk() -> None:
    plain = profiled(codecs=())
    assert plain.risk is None
    assert plain.codecs == ()
    assert plain.points[0].classes[0].codec_bytes == {}


def test_an_unknown_codec_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(CodecError, match="int5"):
        profile_model("no/such/model", batch=1, prompt_tokens=1, response_tokens=1, codecs=["int5"])


def test_a_loss_of_ones_own_calibrates_on_synthetic_micro_batches() -> None:
    def loss(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        logp = model(batch.ids)[:, batch.first - 1 : -1].log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
        return -(logp * batch.advantages[:, None]).sum() / batch.update_tokens

    load = Workload(
        source="stack", dtype="float32", attention="none", head="full", batch=2, prompt_tokens=2, response_tokens=6
    )
    result = profile_module(Stack(Plain, 3).train(), load, vocab_size=256, token_points=1, loss=loss, codecs=("int8",))
    assert result.risk is not None
    assert {"norm.native_layer_norm.0", "up"} <= {unit.unit for unit in result.risk.units[0]}
    assert not result.risk.zero_is_free


class Letters:
    """A tokenizer of single letters; `template` makes it one with a chat template."""

    eos_token_id = 2
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[3 + ord(letter) % 250 for letter in text])


class ChatLetters(Letters):
    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def with_tokenizer(tokenizer: Letters) -> LoadedModel:
    loaded = build("builtin:tiny-llama", dtype="bfloat16")
    return LoadedModel(loaded.model, loaded.name, tokenizer, loaded.vocab_size)


@pytest.mark.parametrize("tokenizer", [Letters(), ChatLetters()], ids=["plain", "chat"])
def test_the_model_completes_prompts_itself(tokenizer: Letters) -> None:
    loaded = with_tokenizer(tokenizer)
    text = calibration_text(loaded, 4, seed=5)
    assert text == calibration_text(loaded, 4, seed=5)
    assert len(text.samples) == 4 * ROWS
    assert all(0 < len(sample.completion) <= COMPLETION_TOKENS for sample in text.samples)
    assert len({sample.prompt for sample in text.samples}) == 4 * ROWS // GROUP
    assert "seed 5" in text.source
    assert loaded.model.training
    assert next(loaded.model.parameters()).dtype == torch.bfloat16


def test_prompts_are_seeded_and_differ() -> None:
    assert arithmetic_prompts(12, seed=1) == arithmetic_prompts(12, seed=1)
    assert len(set(arithmetic_prompts(12, seed=1))) > 10


def write_rollouts(path: Path, count: int) -> Path:
    lines = [
        {"prompt": f"{i} + 1 =", "completion": f" {i + 1}", "reward": float(i % 3 == 0), "group_id": i // 4}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_rollouts_are_taken_from_the_whole_file(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "r.jsonl", 40)
    text = calibration_text(with_tokenizer(Letters()), 5, rollouts=path)
    assert len(text.samples) == 5 * ROWS
    assert "10 of 40 rollouts in r.jsonl" in text.source
    assert {bool(sample.advantage) for sample in text.samples} == {True}


def test_rollouts_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer"):
        calibration_text(build("builtin:tiny-llama"), 4, rollouts=write_rollouts(tmp_path / "r.jsonl", 8))


def test_options_of_the_command_line(tmp_path: Path) -> None:
    assert read_options(None, {}).arguments()["codecs"] == ()
    assert read_options(None, {"codecs": "int8, int4"}).arguments()["codecs"] == CODECS
    (tmp_path / "o.yaml").write_text("codecs: int8\ncalibration-microbatches: 8\nrollouts: r.jsonl\n")
    arguments = read_options(tmp_path / "o.yaml", {"codecs": "none"}).arguments()
    assert (arguments["codecs"], arguments["calibration_microbatches"], arguments["rollouts"]) == ((), 8, "r.jsonl")
    with pytest.raises(FileError, match="calibration-microbatches"):
        read_options(None, {"calibration_microbatches": 2})
