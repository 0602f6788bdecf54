"""The micro-batches of a calibration: real rows of text, each micro-batch with its loss and its exposure.

The loss is the sum of c_t logp_t over the response tokens, c_t being the coefficients of the profile's loss (see
`exposure.coefficients`): it has the gradient of the GRPO loss itself, for data that are on-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.exposure import exposure
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import normaliser_for
from hilore_plan.exposure.rollouts import group_advantages
from hilore_plan.exposure.zeros import may_skip
from hilore_plan.profiler.head import fused_log_probs
from hilore_plan.profiler.step import Loss, MicroBatch, causal_lm_of, head_scale_of, make_micro_batches
from hilore_plan.schema.record import Workload

MICRO_BATCHES = 16
ROWS = 2
GROUP = 4
# of the groups, those that get equal rewards: what every second to fourth group of a real run is like
ZERO_GROUPS = 0.25

# prompt and response of a row of random tokens
RANDOM_TOKENS = (16, 48)

LOSS = LossConfig(loss_type="dapo")


@dataclass(frozen=True)
class Sample:
    """One row: tokens of a prompt and of its completion, and the completion's advantage."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    advantage: float


@dataclass(frozen=True)
class CalibrationBatch:
    """One micro-batch: its loss as a function of the model, and its exposure (absolute, L2)."""

    loss: Callable[[nn.Module], torch.Tensor]
    exposure: float


@dataclass(frozen=True)
class CalibrationText:
    """What to calibrate on; `source` says in words where it comes from."""

    samples: tuple[Sample, ...]
    source: str


@dataclass(frozen=True)
class CalibrationData:
    """The micro-batches, where they come from in words, and whether without coefficients they have no gradient."""

    batches: list[CalibrationBatch]
    source: str
    zero_is_free: bool


def random_text(micro_batches: int = MICRO_BATCHES, *, vocab_size: int, seed: int) -> CalibrationText:
    """Seeded random tokens, for models without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    rows = micro_batches * ROWS
    prompt, response = RANDOM_TOKENS
    ids = torch.randint(0, vocab_size, (rows, prompt + response), generator=generator).tolist()
    samples = tuple(
        Sample(tuple(row[:prompt]), tuple(row[prompt:]), advantage)
        for row, advantage in zip(ids, seeded_advantages(rows, seed), strict=True)
    )
    return CalibrationText(samples, f"random tokens; seeded rewards (seed {seed})")


def seeded_advantages(rows: int, seed: int) -> tuple[float, ...]:
    """Group-normalised advantages of random rewards 0 or 1; at least a quarter of the groups carry no signal."""
    generator = torch.Generator().manual_seed(seed)
    groups = [index // GROUP for index in range(rows)]
    count = groups[-1] + 1
    flat = set(torch.randperm(count, generator=generator)[: -int(-count * ZERO_GROUPS // 1)].tolist())
    rewards: list[float] = []
    for group in range(count):
        size = groups.count(group)
        right = 0 if group in flat else int(torch.randint(1, max(size, 2), (1,), generator=generator))
        order = torch.randperm(size, generator=generator).tolist()
        rewards += [float(place < right) for place in order]
    return group_advantages(rewards, groups)


def text_data(text: CalibrationText, device: torch.device, *, rows: int = ROWS) -> CalibrationData:
    """Micro-batches of `rows` rows each; rows that are left over are dropped.

    Raises:
        UsageError: not enough rows for one micro-batch.
    """
    samples = text.samples
    groups = [samples[start : start + rows] for start in range(0, len(samples) - rows + 1, rows)]
    if not groups:
        raise UsageError(f"{len(samples)} rows are too few to calibrate on", f"give at least {4 * rows}")
    tokens = sum(len(sample.completion) for group in groups for sample in group)
    return CalibrationData([text_batch(group, tokens, device) for group in groups], text.source, may_skip(LOSS).allowed)


def step_data(workload: Workload, loss: Loss, vocab_size: int, device: torch.device, seed: int) -> CalibrationData:
    """Synthetic micro-batches like those of an `ActorStep`, for a loss of the caller's own."""
    more = workload.model_copy(update={"micro_batches": MICRO_BATCHES})
    batches = make_micro_batches(more, vocab_size=vocab_size, device=device, seed=seed)
    made = [CalibrationBatch(partial(_own_loss, loss, batch), batch.exposure) for batch in batches]
    return CalibrationData(made, f"random tokens and advantages (seed {seed})", False)


def _own_loss(loss: Loss, batch: MicroBatch, model: nn.Module) -> torch.Tensor:
    return loss(model, batch)


def text_batch(samples: Sequence[Sample], tokens: int, device: torch.device) -> CalibrationBatch:
    """One micro-batch of a step that has so many `tokens` in its completions, padded to the longest of these rows."""
    length = max(len(sample.prompt) + len(sample.completion) for sample in samples)
    ids = torch.zeros((len(samples), length), dtype=torch.long)
    # whether position t is asked for token t + 1; what fills a row up comes after all that counts
    mask = torch.zeros((len(samples), length - 1), dtype=torch.bool)
    for row, sample in enumerate(samples):
        whole = sample.prompt + sample.completion
        ids[row, : len(whole)] = torch.tensor(whole)
        mask[row, max(len(sample.prompt), 1) - 1 : len(whole) - 1] = True
    advantages = torch.tensor([sample.advantage for sample in samples])
    weights = coefficients(
        LOSS, logps=None, advantages=advantages, mask=mask, normaliser=normaliser_for(LOSS, tokens=tokens)
    )
    loss = partial(_text_loss, ids.to(device), mask.to(device), weights.to(device))
    return CalibrationBatch(loss, exposure(weights))


def _text_loss(ids: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, model: nn.Module) -> torch.Tensor:
    language_model: Any = causal_lm_of(model)
    hidden = language_model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    head = language_model.get_output_embeddings()
    scale = head_scale_of(language_model)
    log_probs = fused_log_probs(hidden[:, :-1][mask], head.weight, head.bias, ids[:, 1:][mask], scale)
    return (log_probs * weights[mask]).sum()
