"""Tiny runs of TRL's trainers, without a plan and under any plan: the same seeds, models, data and settings."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from runtime.rig import assert_bit_equal
from torch import nn

from hilore_plan.integrations.families import VOCABULARY, build_family
from hilore_plan.integrations.trl import attach_to
from hilore_plan.runtime.attach import Runtime
from hilore_plan.runtime.meter import Meter
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.plan import Plan

STEPS, BLOCKS, ROWS, ACCUMULATION = 2, 2, 4, 2
# TRL 1.16 and peft 0.21 use names that transformers 5.24 is about to change
MARKS = [
    pytest.mark.setups,
    pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
_SIZES: dict[str, dict[str, int]] = {
    "llama": {**_SMALL, "num_hidden_layers": BLOCKS},
    "gpt2-dropout": {"n_embd": 16, "n_head": 2, "n_layer": BLOCKS},
    "qwen3_moe": {**_SMALL, "head_dim": 8, "num_hidden_layers": BLOCKS},
}
_COMMON: dict[str, Any] = {
    "max_steps": STEPS, "learning_rate": 1e-2, "bf16": False, "use_cpu": True, "report_to": "none", "seed": 0,
    "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "gradient_accumulation_steps": ACCUMULATION,
}  # fmt: skip
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """One way to train.

    Args:
        settings: what differs from the defaults of the trainer's config.
        adapter: settings of a LoRA adapter that the trainer makes; None: it makes none.
        family: of the model.
        dtype: of its parameters.
        attention: its kernel.
        prepare: what the user does to the model before the trainer gets it.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    family: str = "llama"
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    prepare: Callable[[nn.Module], nn.Module] | None = None

    @property
    def seed(self) -> int:
        """Of the random plan that it is trained under."""
        return zlib.crc32(repr((dict(self.settings), self.adapter, self.family, self.dtype)).encode())


@dataclass(frozen=True)
class Run:
    """What became of a training run."""

    trainer: Any
    parameters: Parameters
    runtime: Runtime | None = None


Make = Callable[[Setup, Path], Any]


def make_tokenizer() -> Any:
    """One token for each character: nothing is downloaded, and the vocabulary is that of the tiny models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL.values(), *map(chr, range(32, 32 + VOCABULARY - len(_SPECIAL)))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, " "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **_SPECIAL)


def make_model(setup: Setup, folder: Path) -> nn.Module:
    """The model of a setup, saved as well: TRL loads its own reference model from where the model came from."""
    sizes = _SIZES[setup.family]
    model = build_family(setup.family, dtype=setup.dtype, attention=setup.attention, seed=0, **sizes).train()
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")  # type: ignore[operator]
    model.config._name_or_path = str(folder / "model")  # type: ignore[union-attr]
    torch.manual_seed(0)  # for adapters
    return setup.prepare(model) if setup.prepare else model


def lora(**settings: Any) -> Any:
    """The config of a LoRA adapter on every linear layer of the blocks."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})


def _arguments(setup: Setup, folder: Path, **defaults: Any) -> dict[str, Any]:
    return {**_COMMON, "output_dir": str(folder / "out"), **defaults, **setup.settings}


def _parts(setup: Setup, folder: Path) -> dict[str, Any]:
    adapter = None if setup.adapter is None else lora(**setup.adapter)
    return {"model": make_model(setup, folder), "processing_class": make_tokenizer(), "peft_config": adapter}


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def make_grpo(setup: Setup, folder: Path) -> Any:
    """A `GRPOTrainer` for prompts of different lengths."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    defaults = {"per_device_train_batch_size": ROWS, "num_generations": ROWS, "max_completion_length": 6}
    data = Dataset.from_list([{"prompt": "two and " * (i % 3 + 1)} for i in range(32)])
    return GRPOTrainer(
        args=GRPOConfig(**_arguments(setup, folder, **defaults)),
        reward_funcs=_reward,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        **_parts(setup, folder),
    )


# of the tiny models' 256 tokens, those that are sampled: so few that many completions end early
_SAMPLED = {"suppress_tokens": list(range(10, 256))}


def _reward_of_lengths(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Of prompts of one length none depends on the answer, so that their rows are silent."""
    flat = [len(prompt) == len("two and ") for prompt in prompts]
    return [1.0 if same else len(text) % 5 / 5 for same, text in zip(flat, completions, strict=True)]


def make_uneven_grpo(setup: Setup, folder: Path) -> Any:
    """A `GRPOTrainer` with completions of different lengths, and rows without signal among those of a step."""
    trainer = make_grpo(replace(setup, settings={"generation_kwargs": _SAMPLED, **setup.settings}), folder)
    trainer.reward_funcs = [_reward_of_lengths]
    return trainer


def make_sft(setup: Setup, folder: Path) -> Any:
    """An `SFTTrainer` for prompts and completions of different lengths."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": "two and " * (i % 3 + 1), "completion": "is " * (i % 4 + 1)} for i in range(32)]
    data = Dataset.from_list(rows)
    arguments = SFTConfig(**_arguments(setup, folder, per_device_train_batch_size=ROWS))
    return SFTTrainer(args=arguments, train_dataset=data, eval_dataset=data.select(range(8)), **_parts(setup, folder))


def make_dpo(setup: Setup, folder: Path) -> Any:
    """A `DPOTrainer` for pairs of different lengths."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": "two and " * (i % 3 + 1), "chosen": "is " * (i % 4 + 1), "rejected": "isn't"} for i in range(32)]
    data = Dataset.from_list(rows)
    arguments = DPOConfig(**_arguments(setup, folder, per_device_train_batch_size=ROWS))
    return DPOTrainer(args=arguments, train_dataset=data, eval_dataset=data.select(range(8)), **_parts(setup, folder))


def train(
    trainer: Any,
    plan: Plan | None = None,
    *,
    resume: str | None = None,
    meter: Meter | None = None,
    variants: Variants | None = None,
) -> Run:
    """Train to the end, under a plan if there is one.

    Args:
        trainer: a fresh one.
        plan: None: none.
        resume: the checkpoint to go on from.
        meter: exposures that are known from the start.
        variants: graphs that have been captured before.
    """
    torch.manual_seed(1)
    if plan is None:
        trainer.train(resume_from_checkpoint=resume)
        return Run(trainer, parameters_of(trainer))
    attachment = attach_to(trainer, plan)
    try:
        if meter or variants:
            runtime = attachment.runtime_of(trainer, trainer.model)
            runtime.meter, runtime.variants = meter or runtime.meter, variants or runtime.variants
        trainer.train(resume_from_checkpoint=resume)
        (runtime,) = attachment.runtimes
    finally:
        attachment.undo()
    return Run(trainer, parameters_of(trainer), runtime)


def parameters_of(trainer: Any) -> Parameters:
    """All parameters, trained or not, as they are now."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_plans_are_exact(
    make: Make,
    setup: Setup,
    folder: Path,
    *,
    variants: Variants | None = None,
    resume: str | None = None,
    steps: int = STEPS,
) -> Run:
    """A run without a plan ends with the same parameters as one that recomputes all, and as one with a mixed plan."""
    plain = train(make(setup, folder), resume=resume)
    trainer = make(setup, folder)
    assert_learned(parameters_of(trainer), plain.parameters)
    recomputed = train(trainer, plans.make_plan(trainer.model), resume=resume, variants=variants)
    assert recomputed.runtime is not None
    actions = plans.choose(plans.graphs_of(recomputed.runtime), plans.seeded(setup.seed))
    trainer = make(setup, folder)
    plan = plans.make_plan(trainer.model, actions)
    mixed = train(trainer, plan, resume=resume, variants=recomputed.runtime.variants)
    for run in (recomputed, mixed):
        assert_bit_equal(run.parameters, plain.parameters)
        assert_as_planned(run, steps * setup.settings.get("gradient_accumulation_steps", ACCUMULATION))
    return mixed


def assert_learned(before: Parameters, after: Parameters) -> None:
    """Training has changed something in the last block: equal parameters say nothing where nothing happens."""
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(f".{BLOCKS - 1}." in name for name in changed), changed


def assert_as_planned(run: Run, micro_batches: int) -> None:
    """Every training forward, and no other, ran under the plan, and nothing had to be done otherwise."""
    assert run.runtime is not None
    report = run.runtime.report()
    assert report.frames == sum(use.frames for use in report.entries) == micro_batches * BLOCKS
    assert report.programs_run > 0
    assert not report.fallbacks
    assert not report.stored_instead
