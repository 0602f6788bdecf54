"""What happens to a block that cannot be captured: checkpoint it, or store if a second run would change it (R10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hilore_plan.graph.signature import PLAIN, Call
from hilore_plan.runtime.changed import version_of

Forward = Callable[..., Any]


class Fallback:
    """Runs a block's forward without a plan. The first time plainly, to see whether forward changes its own state.

    Args:
        block: the block.
        forward: its own forward.
        stored: whether it cannot be checkpointed either.
    """

    def __init__(self, block: nn.Module, forward: Forward, *, stored: bool = False) -> None:
        self._block = block
        self._forward = forward
        self._stored = stored
        self._repeatable: bool | None = False if stored else None

    @property
    def repeatable(self) -> bool | None:
        """Whether forward leaves no trace and may run twice; None until it has run once."""
        return self._repeatable

    @property
    def description(self) -> str:
        """What is done instead of the plan."""
        if self._stored:
            return "stored"
        return "stored, as its forward changes its own state" if self._repeatable is False else "checkpointed"

    def run(self, call: Call) -> Any:
        """The block's output for this call."""
        args, kwargs = call.rebuild(call.tensors)
        if self._repeatable is None:
            before = self._state(call)
            output = self._forward(*args, **kwargs)
            self._repeatable = before == self._state(call)
            return output
        if not self._repeatable:
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

    def _state(self, call: Call) -> Any:
        versions = [version_of(tensor) for tensor in (*self._block.buffers(), *call.tensors)]
        opaque = [_identities(leaf) for leaf in call.leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))]
        return versions, opaque, [_attributes(module) for module in self._block.modules()]


def _identities(argument: Any) -> Any:
    """What an argument of unknown kind holds; never the same twice for a key-value cache, which forward fills."""
    if hasattr(argument, "get_seq_length"):
        return object()
    return {name: id(value) for name, value in getattr(argument, "__dict__", {}).items()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes by value, tensors by identity and version."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
    tensors = {name: (id(v), version_of(v)) for name, v in vars(module).items() if isinstance(v, torch.Tensor)}
    return {**plain, **tensors}
