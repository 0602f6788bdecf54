"""Which ops give the same result when they run a second time."""

from __future__ import annotations

import torch
from torch import fx

# what is in the memory that they hand out is anybody's guess
UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize")
# add up in the order in which threads arrive on a GPU
UNORDERED_ON_CUDA = ("index_add", "scatter_add", "scatter_reduce", "index_put", "index_reduce", "histc", "bincount")


def is_repeatable(node: fx.Node) -> bool:
    """Whether running the node's op again on the same inputs gives the same bits."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target.overloadpacket.__name__.strip("_")
    if name in UNINITIALISED:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags and not _is_without_dropout(node):
        return False
    return not (_device_type(node) == "cuda" and name in UNORDERED_ON_CUDA)


def _is_without_dropout(node: fx.Node) -> bool:
    """Fused attention counts as random, but draws nothing at dropout 0."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[index : index + 1] or [node.kwargs.get(argument.name, argument.default_value)]
            return bool(given[0] == 0)
    return False


def _device_type(node: fx.Node) -> str:
    value = node.meta["val"]
    first = value if torch.is_tensor(value) else next(filter(torch.is_tensor, value))
    return str(first.device.type)
