"""Micro-batches of TRL as dictionaries of rows: put together, picked from, and cut to their longest completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hilore_plan.errors import RefusedError

Inputs = dict[str, Any]


def joined(batches: Sequence[Inputs]) -> Inputs:
    """The rows of micro-batches of one generation in one; what is no row's (counts, None) is taken once.

    Raises:
        RefusedError: an input that does not have one item for each row.
    """
    return {name: _joined(name, [batch[name] for batch in batches], _row_counts(batches)) for name in batches[0]}


def _joined(name: str, values: Sequence[Any], rows: Sequence[int]) -> Any:
    first = values[0]
    if first is None or (isinstance(first, torch.Tensor) and first.dim() == 0):
        return first
    # images are counted by patches or tiles, which even where they happen to be as many as rows are not theirs
    if name == "num_images" or [len(value) for value in values] != list(rows):
        raise RefusedError(f"the input {name} does not have one item for each row", "train without --regroup")
    return torch.cat(list(values)) if isinstance(first, torch.Tensor) else [item for value in values for item in value]


def _row_counts(batches: Sequence[Inputs]) -> list[int]:
    return [len(batch["completion_ids"]) for batch in batches]


def completion_lengths(inputs: Inputs, multiple: int) -> list[int]:
    """The width that each row's completion needs, rounded up as the trainer pads."""
    mask = inputs["completion_mask"]
    width = mask.shape[1]
    places = torch.arange(1, width + 1, device=mask.device)
    ends = ((mask != 0) * places).amax(1).clamp(min=1).tolist()
    return [min(width, -(-end // multiple) * multiple) for end in ends]


def picked(inputs: Inputs, rows: Sequence[int], length: int) -> Inputs:
    """Some rows, their completions cut to a length."""
    width = inputs["completion_ids"].shape[1]
    index = torch.tensor(rows, device=inputs["completion_ids"].device)
    return {name: _picked(value, index, length, _is_wide(name, value, width)) for name, value in inputs.items()}


def _picked(value: Any, index: torch.Tensor, length: int, wide: bool) -> Any:
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return value
    if not isinstance(value, torch.Tensor):
        return [value[i] for i in index.tolist()]
    chosen = value[index]
    return chosen[:, :length].contiguous() if wide else chosen


def _is_wide(name: str, value: Any, width: int) -> bool:
    """Whether a value has one item for each token of a completion; prompts may happen to be as wide."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() >= 2
        and value.shape[1] == width
        and name not in ("prompt_ids", "prompt_mask")
    )
