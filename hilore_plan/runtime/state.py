"""A block's parameters and buffers, read live: where they are kept, not what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hilore_plan.runtime.changed import changed_in_place


class BlockState:
    """Where each parameter and buffer of a block lives: the module's own dictionary, and the key.

    FSDP2 and PEFT put other tensors there between forward and backward; what counts is what is there when it is read.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = dict(block.named_modules(remove_duplicate=False))
        self.names = (*dict(block.named_parameters()), *dict(block.named_buffers()))
        self._places = [_place(modules, name) for name in self.names]

    def tensors(self) -> list[torch.Tensor]:
        """All of them, now."""
        return [place[key] for place, key in self._places]

    def versions(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The version counters of some of them, now."""
        return tuple(self._places[i][0][self._places[i][1]]._version for i in indices)

    def read(self, indices: Sequence[int], versions: Sequence[int]) -> list[torch.Tensor]:
        """Some of them, now.

        Raises:
            RecoveryError: one was changed in place since its version was noted.
        """
        tensors = []
        for index, version in zip(indices, versions, strict=True):
            place, key = self._places[index]
            tensor = place[key]
            if tensor._version != version:  # R2
                raise changed_in_place(f"parameter {self.names[index]}")
            tensors.append(tensor)
        return tensors


def _place(modules: dict[str, nn.Module], name: str) -> tuple[dict[str, torch.Tensor], str]:
    owner, _, key = name.rpartition(".")
    module = modules[owner]
    place = module._parameters if key in module._parameters else module._buffers
    return place, key  # type: ignore[return-value]
