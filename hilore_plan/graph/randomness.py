"""Which ops give the same result when they run a second time."""

from __future__ import annotations

import operator

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


def is_left_over(node: fx.Node) -> bool:
    """Whether a value is the state of a random generator that its op, fused attention at dropout 0, never drew from.

    On CUDA that is memory that nobody wrote to, which no second run gives again; backward does not read it. Depending
    on torch's version it lies on another device than the captured graph says.
    """
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not isinstance(source.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    if not torch.is_tensor(value) or value.dtype.is_floating_point:
        return False
    fused = source.target.overloadpacket.__name__.strip("_").startswith("scaled_dot_product")
    return fused and _is_without_dropout(source)


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
