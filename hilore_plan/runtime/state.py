"""A block's parameters and buffers: where each is kept, and whether what backward reads is what forward read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hilore_plan.errors import RecoveryError
from hilore_plan.runtime.changed import changed_in_place, version_of

# the tensor, its version and its shape
Note = tuple[torch.Tensor, int, torch.Size]


class BlockState:
    """Where each parameter and buffer of a block lives: the module's own dictionary, and the key.

    Other tensors may stand there between forward and backward: `functional_call` puts the model's own back, FSDP2 its
    shards and then the same whole ones again. What counts is what forward read, for as long as it has memory.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = dict(block.named_modules(remove_duplicate=False))
        self.names = (*dict(block.named_parameters()), *dict(block.named_buffers()))
        self._places = [_place(modules, name) for name in self.names]

    def tensors(self) -> list[torch.Tensor]:
        """All of them, now."""
        return [place[key] for place, key in self._places]

    def notes(self, indices: Sequence[int]) -> tuple[Note, ...]:
        """What some of them are now, to be compared when they are read."""
        found = (self._places[i][0][self._places[i][1]] for i in indices)
        return tuple((tensor, version_of(tensor), tensor.shape) for tensor in found)

    def read(self, indices: Sequence[int], notes: Sequence[Note]) -> list[torch.Tensor]:
        """Some of them, as forward read them.

        Raises:
            RecoveryError: one was changed in place since it was noted, or is not there as a whole.
        """
        tensors = []
        for index, (noted, version, shape) in zip(indices, notes, strict=True):
            place, key = self._places[index]
            tensor = place.get(key, noted) if _is_emptied(noted) else noted
            if version_of(tensor) != version:  # R2
                raise changed_in_place(f"parameter {self.names[index]}")
            if tensor.shape != shape or _is_emptied(tensor):
                raise _not_whole(self.names[index], tensor, shape)
            tensors.append(tensor)
        return tensors


def _is_emptied(tensor: torch.Tensor) -> bool:
    """Whether the memory behind a tensor has been let go: reading it would end the process."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):  # a subclass need not have a storage
        return False
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() == 0 < tensor.numel()


def _not_whole(name: str, tensor: torch.Tensor, shape: torch.Size) -> RecoveryError:
    found = "has no memory" if tensor.shape == shape else f"is of shape {list(tensor.shape)}"
    return RecoveryError(
        f"parameter {name} {found} when backward reads it; in forward it was of shape {list(shape)}",
        "what shards parameters has to put them back before backward: FSDP2 does so, DeepSpeed ZeRO-3 does not",
    )


def _place(modules: dict[str, nn.Module], name: str) -> tuple[dict[str, torch.Tensor], str]:
    owner, _, key = name.rpartition(".")
    module = modules[owner]
    place = module._parameters if key in module._parameters else module._buffers
    return place, key  # type: ignore[return-value]
