"""`profile_model`: from the name of a model, or a model, to its profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from hilore_plan.integrations.builtin_models import LoadedModel, build, vocabulary_size
from hilore_plan.integrations.calibration_text import calibration_text
from hilore_plan.integrations.lora import add_lora
from hilore_plan.profiler.calibration import compressing
from hilore_plan.profiler.profile import profile_module
from hilore_plan.progress import Progress, Silent
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Head, Workload


def profile_model(
    source_or_module: str | nn.Module,
    *,
    batch: int,
    prompt_tokens: int,
    response_tokens: int,
    dtype: str = "bfloat16",
    device: str = "cpu",
    attention: str = "sdpa",
    lora_rank: int = 0,
    head: Head = "fused",
    accumulation: bool = True,
    token_points: int = 4,
    blocks: Sequence[str] | None = None,
    codecs: Sequence[str] = (),
    calibration_microbatches: int = 16,
    rollouts: str | Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measures what each choice of a plan costs for this model on this machine.

    Args:
        source_or_module: a hub id, a directory, `builtin:NAME`, `package.module:factory`, or a model. A model is
            taken as it is and put on `device`; its own dtype and attention count, not `dtype` and `attention`.
        batch: rows of a micro-batch.
        prompt_tokens: prompt tokens of a row.
        response_tokens: response tokens of a row; the loss is over these.
        dtype: `bfloat16`, `float16` or `float32`.
        device: where to measure, e.g. `cpu` or `cuda`.
        attention: `sdpa` or `eager`.
        lora_rank: rank of LoRA adapters; 0 trains all parameters.
        head: `fused` (log-probabilities in chunks, as TRL >= 1.15) or `full` (all logits at once).
        accumulation: whether gradients are there from the start of a step.
        token_points: micro-batch sizes to measure at.
        blocks: names of the blocks, where they aren't the model's one list of equal modules.
        codecs: codecs to measure and calibrate, such as `int8`, `fp8_e4m3` and `int4`; none: plans can only be exact.
        calibration_microbatches: micro-batches to calibrate on, a quarter of them kept aside to judge by.
        rollouts: a JSONL file with prompts, completions and rewards or advantages to calibrate on; without it the
            model samples completions itself, or takes random tokens if it has no tokenizer.
        progress: told what is measured.

    Raises:
        UsageError: an argument that makes no sense.
        FileError: a model or rollouts that cannot be read.
        DeviceError: a device that isn't there.
        CodecError: a codec that does not exist.
    """
    compressing(codecs)
    if isinstance(source_or_module, str):
        loaded = build(source_or_module, dtype=dtype, attention=attention, lora_rank=lora_rank, device=device)
    else:
        loaded = _given(source_or_module, lora_rank, device)
        dtype, attention = _dtype_of(loaded.model), _attention_of(loaded.model, attention)
    workload = Workload(
        source=source_or_module if isinstance(source_or_module, str) else loaded.name,
        dtype=dtype,
        attention=attention,
        lora_rank=lora_rank,
        head=head,
        batch=batch,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        accumulation=accumulation,
    )
    path = None if rollouts is None else Path(rollouts)
    text = calibration_text(loaded, calibration_microbatches, rollouts=path) if codecs else None
    return profile_module(
        loaded.model,
        workload,
        vocab_size=loaded.vocab_size,
        device=device,
        token_points=token_points,
        blocks=blocks,
        codecs=codecs,
        calibration=text,
        progress=progress or Silent(),
    )


def _given(model: nn.Module, lora_rank: int, device: str) -> LoadedModel:
    if lora_rank:
        model = add_lora(model, lora_rank, seed=0)
    return LoadedModel(model.to(device).train(), type(model).__name__, None, vocabulary_size(model))


def _dtype_of(model: nn.Module) -> str:
    """The dtype of most of the model's elements."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name])


def _attention_of(model: nn.Module, otherwise: str) -> str:
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or otherwise)
