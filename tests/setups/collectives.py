"""Records the collectives of a rank, in order: what it asks the other ranks for must not depend on a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Collective = tuple[str, tuple[tuple[torch.dtype, torch.Size], ...]]


class Collectives(TorchDispatchMode):
    """While it is active, every collective goes into `calls`: its name, and dtypes and shapes of its tensors."""

    NAMESPACES = ("c10d", "_c10d_functional")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in self.NAMESPACES:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.calls.append((str(func), tuple((tensor.dtype, tensor.shape) for tensor in tensors)))
        return func(*args, **(kwargs or {}))
