"""Reentrant checkpointing: forward runs without gradients, and once more, as a whole, inside backward."""

from __future__ import annotations

from typing import Any

import torch

from hilore_plan.errors import RefusedError

# of torch.utils.checkpoint, and of the copies of it in DeepSpeed and Megatron
_NODE = "CheckpointFunctionBackward"


def refuse_in_reentrant(name: str) -> None:
    """Called at the start of a block's forward.

    Raises:
        RefusedError: reentrant checkpointing is running the forward a second time: a plan would save nothing, and
            where a region's inputs need no gradient, its parameters get none.
    """
    node: Any = torch._C._current_autograd_node()  # None outside of backward, whatever its type says
    if node is not None and node.name() == _NODE:
        raise RefusedError(
            f"block {name} is checkpointed with use_reentrant=True, which hides its forward from a plan",
            "call the block without checkpointing: the plan does its work; around other modules, use_reentrant=False",
        )
