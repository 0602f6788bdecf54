"""The text that a model is calibrated on: completions that it samples itself, a file of rollouts, or random tokens.

Prompts are small sums and word problems, put into the tokenizer's chat template; they are written here, so that no data
set has to be fetched. A reward would need a judge of the answers: rewards are seeded instead, a quarter of the groups
being without signal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.exposure.rollouts import Rollout, Text, read_rollouts
from hilore_plan.integrations.builtin_models import LoadedModel
from hilore_plan.integrations.extras import quiet_transformers
from hilore_plan.profiler.batches import GROUP, ROWS, CalibrationText, Sample, random_text, seeded_advantages
from hilore_plan.profiler.fp32 import in_fp32

# tokens of a row at most: errors are told by their ratio to the gradient, for which short rows do
PROMPT_TOKENS = 64
COMPLETION_TOKENS = 48
_FORMS = (
    "What is {a} + {b}?",
    "Compute {a} * {b}. Think step by step.",
    "Tom has {a} apples and gives {b} of them away. How many apples are left?",
    "What is {a} - {b}? Explain.",
    "A train goes {a} km an hour. How far does it come in {b} hours?",
    "Which is larger, {a} + {b} or {a} * 2?",
)


def calibration_text(
    loaded: LoadedModel, micro_batches: int, *, rollouts: Path | None = None, seed: int = 0
) -> CalibrationText:
    """Rows for `micro_batches` micro-batches of `ROWS` rows each.

    Args:
        loaded: the model, with its tokenizer if it has one.
        micro_batches: how many are wanted; a file of rollouts may have fewer.
        rollouts: a JSONL file (see `exposure.rollouts`) to take instead of sampling.
        seed: of prompts, sampling and rewards.

    Raises:
        UsageError: rollouts for a model without a tokenizer, or too few of them.
        FileError: rollouts that cannot be read.
    """
    if rollouts is not None:
        return _from_rollouts(loaded.tokenizer, rollouts, micro_batches)
    if loaded.tokenizer is None or not hasattr(loaded.model, "generate"):
        return random_text(micro_batches, vocab_size=loaded.vocab_size, seed=seed)
    return _sampled(loaded, micro_batches, seed)


def arithmetic_prompts(count: int, seed: int) -> list[str]:
    """Questions about small numbers."""
    choose = random.Random(seed)  # noqa: S311 - which sums are asked is no secret
    pairs = [sorted((choose.randint(2, 60), choose.randint(2, 60)), reverse=True) for _ in range(count)]
    return [_FORMS[i % len(_FORMS)].format(a=a, b=b) for i, (a, b) in enumerate(pairs)]


def _sampled(loaded: LoadedModel, micro_batches: int, seed: int) -> CalibrationText:
    rows = micro_batches * ROWS
    prompts = arithmetic_prompts(-(-rows // GROUP), seed)
    asked = [_prompt_ids(loaded.tokenizer, prompt) for prompt in prompts for _ in range(GROUP)][:rows]
    completions = _complete(loaded, asked, seed)
    advantages = seeded_advantages(rows, seed)
    samples = tuple(Sample(p, c, a) for p, c, a in zip(asked, completions, advantages, strict=True))
    source = f"completions of at most {COMPLETION_TOKENS} tokens sampled from the model on arithmetic prompts"
    return CalibrationText(samples, f"{source}; seeded rewards (seed {seed})")


def _prompt_ids(tokenizer: Any, prompt: Text) -> tuple[int, ...]:
    """A prompt's last tokens, through the chat template where there is one; text from a file is taken as it is."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if getattr(tokenizer, "chat_template", None):
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
    else:
        ids = tokenizer("\n".join(message["content"] for message in messages)).input_ids
    return tuple(ids[-PROMPT_TOKENS:])


def _complete(loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], seed: int) -> list[tuple[int, ...]]:
    """One sampled completion for each prompt, up to and with its end token."""
    model: Any = loaded.model
    ends = _end_tokens(loaded)
    longest = max(map(len, prompts))
    padding = min(ends, default=0)
    ids = torch.tensor([[padding] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with in_fp32(model), _evaluating(model), quiet_transformers(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        made = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=COMPLETION_TOKENS,
            pad_token_id=padding,
            use_cache=True,
        )
    return [_ended(row, ends) for row in made[:, longest:].tolist()]


def _end_tokens(loaded: LoadedModel) -> set[int]:
    configured = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {token for token in (*found, loaded.tokenizer.eos_token_id) if token is not None}


def _ended(row: list[int], ends: set[int]) -> tuple[int, ...]:
    last = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return tuple(row[: last + 1])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back to the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


def _from_rollouts(tokenizer: Any, path: Path, micro_batches: int) -> CalibrationText:
    """Micro-batches of neighbouring rows, taken evenly from the whole file."""
    if tokenizer is None:
        raise UsageError("rollouts are text, and this model has no tokenizer", "leave --rollouts out")
    rows = read_rollouts(path)
    there = len(rows) // ROWS
    count = min(micro_batches, there)
    starts = [ROWS * (there * number // count) for number in range(count)]
    samples = [_tokenized(tokenizer, rows[start + place]) for start in starts for place in range(ROWS)]
    cut = f"cut to {PROMPT_TOKENS} and {COMPLETION_TOKENS} tokens"
    return CalibrationText(tuple(samples), f"{len(samples)} of {len(rows)} rollouts in {path.name}, {cut}")


def _tokenized(tokenizer: Any, rollout: Rollout) -> Sample:
    prompt = rollout.prompt
    ids = (
        tuple(tokenizer(prompt).input_ids[-PROMPT_TOKENS:])
        if isinstance(prompt, str)
        else _prompt_ids(tokenizer, prompt)
    )
    completion = rollout.completion
    text = completion if isinstance(completion, str) else "\n".join(message["content"] for message in completion)
    made = tokenizer(text, add_special_tokens=False).input_ids[:COMPLETION_TOKENS]
    return Sample(ids, tuple(made), rollout.advantage)
