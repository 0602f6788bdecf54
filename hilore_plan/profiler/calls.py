"""The real arguments of every block, from one forward of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.graph.signature import Call, flatten_call


def record_calls(blocks: Sequence[nn.Module], forward: Callable[[], object]) -> list[Call]:
    """The call of each block while `forward` runs, its tensors cut off from the graph of autograd.

    Raises:
        UsageError: a block did not run exactly once.
    """
    calls: dict[int, list[Call]] = {index: [] for index in range(len(blocks))}
    handles = [
        block.register_forward_pre_hook(_recorder(calls[index]), with_kwargs=True) for index, block in enumerate(blocks)
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    for index, found in calls.items():
        if len(found) != 1:
            raise UsageError(
                f"block {index} ran {len(found)} times in one forward",
                "list the blocks that run exactly once with blocks=",
            )
    return [found[0] for found in calls.values()]


def _recorder(found: list[Call]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = flatten_call(args, kwargs)
        leaves = tuple(_cut(leaf) if torch.is_tensor(leaf) else leaf for leaf in call.leaves)
        found.append(Call(leaves, call.spec, call.positions))

    return record


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def shared_storages(calls: Sequence[Call]) -> set[int]:
    """Addresses of the storages that are passed to more than one block (rotary tables, masks)."""
    seen: dict[int, set[int]] = {}
    for index, call in enumerate(calls):
        for tensor in call.tensors:
            seen.setdefault(storage_of(tensor), set()).add(index)
    return {storage for storage, blocks in seen.items() if len(blocks) > 1}


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
