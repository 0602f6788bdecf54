"""Engines that hide a block's parameters from a recovery program: refused by name.

FSDP2 swaps whole parameters in for a block's backward, and DDP never takes them apart. The others do not give a block's
parameters back where the block had them: what a plan would read is empty, or not what forward computed with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from hilore_plan.errors import RefusedError

# named, not imported: what has never been imported wraps nothing
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_INSTEAD = "shard the model with FSDP2 (torch.distributed.fsdp.fully_shard on each block), or train it with DDP"


def refuse_sharded(model: nn.Module) -> None:
    """Look for such engines around and inside a model.

    Raises:
        RefusedError: the model, or a part of it, is under FSDP1, DeepSpeed ZeRO-3, or DataParallel on several devices.
    """
    if any(isinstance(module, nn.DataParallel) and len(module.device_ids) > 1 for module in model.modules()):
        raise RefusedError(
            "the model is wrapped in DataParallel, whose replicas have no plan of their own",
            "train it with DDP: torchrun starts a process for each device",
        )
    wrapper = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", None)
    if wrapper is not None and any(isinstance(module, wrapper) for module in model.modules()):
        raise _fsdp1("the model")
    refuse_partitioned("the model", model)


def refuse_partitioned(name: str, module: nn.Module) -> None:
    """Look for parameters that such an engine has taken out of a module.

    Raises:
        RefusedError: there are some.
    """
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise RefusedError(f"{name} is partitioned by DeepSpeed ZeRO-3, which empties its parameters", _INSTEAD)
    if any(getattr(tensor._base, "_is_flat_param", False) for tensor in _plain_tensors(module)):
        raise _fsdp1(name)


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor, as FSDP2 makes of it between two forwards."""
    return hasattr(tensor, "to_local")


def is_sharded(block: nn.Module) -> bool:
    """Whether FSDP2 has parameters of a block."""
    return any(map(is_shard, block.parameters()))


def _fsdp1(name: str) -> RefusedError:
    return RefusedError(
        f"{name} is wrapped in FullyShardedDataParallel (FSDP1), which makes one flat parameter of many",
        _INSTEAD + "; in accelerate: fsdp_version: 2",
    )


def _plain_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that are attributes, not parameters or buffers: where FSDP1 puts views of its flat parameter."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                yield value
