"""What each loss divides by: row i's factor Z_i in Loss = sum over i and t of Z_i m_it l_it.

With B rows in the micro-batch, n_i counted tokens in row i, GA accumulated micro-batches, P ranks, S = steps per
generation, N counted tokens in a generation's batch over all ranks, and L = the longest completion allowed (TRL 1.16,
`GRPOTrainer._compute_loss`; every count of tokens that is 0 stands as 1):

| kind | Z_i | losses |
| --- | --- | --- |
| `row_mean` | 1 / (n_i B GA) | grpo, sapo |
| `row_sum` | 1 / (B GA) | luspo |
| `micro_batch_tokens` | 1 / (sum of all n_i in the micro-batch, GA) | bnpo |
| `longest` | 1 / (B L GA) | dr_grpo |
| `generation_tokens` | P S / (N GA) | dapo, cispo, vespo |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hilore_plan.errors import UsageError
from hilore_plan.exposure.losses import LossConfig, LossType

Kind = Literal["row_mean", "row_sum", "micro_batch_tokens", "longest", "generation_tokens"]

KIND_OF_LOSS: dict[LossType, Kind] = {
    "grpo": "row_mean",
    "sapo": "row_mean",
    "luspo": "row_sum",
    "bnpo": "micro_batch_tokens",
    "dr_grpo": "longest",
    "dapo": "generation_tokens",
    "cispo": "generation_tokens",
    "vespo": "generation_tokens",
}


_NEEDED: dict[Kind, str] = {"generation_tokens": "tokens", "longest": "max_completion_length"}


@dataclass(frozen=True)
class Normaliser:
    """How a loss weighs its rows; see the table above. Make it with `normaliser_for`.

    Args:
        kind: a row of the table.
        accumulation: GA, the micro-batches of this optimizer step (at the end of an epoch there may be fewer).
        rows: B; None: the rows of the mask. Give the trainer's own B where rows were regrouped.
        tokens: N, a number or a tensor of one element (it is not brought to the CPU).
        ranks: P.
        steps_per_generation: S; None: GA, TRL's default.
        max_completion_length: L.
    """

    kind: Kind
    accumulation: int = 1
    rows: int | None = None
    tokens: float | Tensor | None = None
    ranks: int = 1
    steps_per_generation: int | None = None
    max_completion_length: int | None = None

    def __post_init__(self) -> None:
        if (needed := _NEEDED.get(self.kind)) and getattr(self, needed) is None:
            raise UsageError(f"the normaliser {self.kind!r} divides by {needed}, which is None", f"give {needed}=...")
        counts = (self.accumulation, self.rows, self.ranks, self.steps_per_generation, self.max_completion_length)
        if any(count is not None and count < 1 for count in counts):
            raise UsageError(f"a count below 1 makes no sense: {self}", "give the trainer's own counts")

    @property
    def ignores_grouping(self) -> bool:
        """Whether rows may move to other micro-batches of the same step, with `rows` kept, and Z_i stays the same."""
        return self.kind != "micro_batch_tokens"

    @property
    def counts_rows(self) -> bool:
        """Whether Z_i depends on how many rows row i's micro-batch has: B is counted, not given."""
        return self.rows is None and self.kind in ("row_mean", "row_sum", "longest")

    def factors(self, mask: Tensor) -> Tensor:
        """Z_i of every row.

        Args:
            mask: `[B, T]`, floating, 1 where a token counts.

        Returns:
            `[B, 1]`, of the mask's dtype and device.
        """
        return _FACTORS[self.kind](self, mask)


def normaliser_for(
    config: LossConfig,
    *,
    accumulation: int = 1,
    rows: int | None = None,
    tokens: float | Tensor | None = None,
    ranks: int = 1,
    steps_per_generation: int | None = None,
) -> Normaliser:
    """The normaliser that TRL uses for the loss.

    Raises:
        UsageError: a count that the loss needs is missing.
    """
    kind = KIND_OF_LOSS[config.loss_type]
    return Normaliser(kind, accumulation, rows, tokens, ranks, steps_per_generation, config.max_completion_length)


def row_lengths(mask: Tensor) -> Tensor:
    """n_i, at least 1: `[B, 1]`."""
    return mask.sum(-1, keepdim=True).clamp(min=1)


def _row_mean(its: Normaliser, mask: Tensor) -> Tensor:
    return _row_sum(its, mask) / row_lengths(mask)


def _row_sum(its: Normaliser, mask: Tensor) -> Tensor:
    return _filled(mask, 1 / (_rows(its, mask) * its.accumulation))


def _micro_batch_tokens(its: Normaliser, mask: Tensor) -> Tensor:
    return (1 / (mask.sum().clamp(min=1) * its.accumulation)).expand(len(mask), 1)


def _longest(its: Normaliser, mask: Tensor) -> Tensor:
    assert its.max_completion_length is not None
    return _filled(mask, 1 / (_rows(its, mask) * its.max_completion_length * its.accumulation))


def _generation_tokens(its: Normaliser, mask: Tensor) -> Tensor:
    assert its.tokens is not None
    steps = its.steps_per_generation or its.accumulation
    tokens = torch.as_tensor(its.tokens, dtype=mask.dtype, device=mask.device).clamp(min=1)
    return (its.ranks * steps / (tokens * its.accumulation)).reshape(1, 1).expand(len(mask), 1)


def _rows(its: Normaliser, mask: Tensor) -> int:
    return max(1, len(mask) if its.rows is None else its.rows)


def _filled(mask: Tensor, value: float) -> Tensor:
    return mask.new_full((len(mask), 1), value)


_FACTORS: dict[Kind, Callable[[Normaliser, Tensor], Tensor]] = {
    "row_mean": _row_mean,
    "row_sum": _row_sum,
    "micro_batch_tokens": _micro_batch_tokens,
    "longest": _longest,
    "generation_tokens": _generation_tokens,
}
