"""What distinguishes one call of a block from another: the variant of its graph that the call needs.

Two calls share a variant when their arguments have the same structure and the same plain values, their tensors agree in
all but their sizes, and the block and torch are in the same mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hilore_plan.errors import CaptureError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_LEAF = tree_flatten(None)[1]
PEFT_SWITCHES = ("disable_adapters", "merged", "active_adapters")


@dataclass(frozen=True)
class Call:
    """One call of a block, flattened: `leaves` of the pytree `spec`, and where among them the tensors are."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    positions: tuple[int, ...]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the leaves."""
        return tuple(self.leaves[position] for position in self.positions)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of this call with other tensors in the tensors' places."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def structure_key(self) -> Hashable:
        """Everything of the call but its tensors.

        Raises:
            CaptureError: an argument is of a kind that cannot be part of a graph.
        """
        plain = tuple(None if torch.is_tensor(leaf) else _plain(leaf) for leaf in self.leaves)
        return self.spec, self.positions, plain


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call `block(*args, **kwargs)` as leaves; a key-value cache that holds nothing yet counts as None."""
    leaves: list[Any] = []
    spec = _flatten((args, dict(kwargs)), leaves)
    leaves = [None if _is_empty_cache(leaf) else leaf for leaf in leaves]
    return Call(tuple(leaves), spec, tuple(i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)))


def _flatten(node: Any, leaves: list[Any]) -> TreeSpec:
    """As torch's `tree_flatten`, which in torch 2.13 leaves a cycle of Python objects behind at each call."""
    kind = type(node)
    if kind is tuple or kind is list:
        return TreeSpec(kind, None, [_flatten(item, leaves) for item in node])
    if kind is dict:
        return TreeSpec(kind, list(node), [_flatten(item, leaves) for item in node.values()])
    if torch.is_tensor(node) or isinstance(node, PLAIN):
        leaves.append(node)
        return _LEAF
    inner, spec = tree_flatten(node)
    leaves += inner
    return spec


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """What a graph fixes of a tensor: all but the sizes of its dimensions above one."""
    contiguous = tensor.is_contiguous()
    return (
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tuple(size == 1 for size in tensor.shape),
        contiguous,
        None if contiguous else _stride_order(tensor),
        type(tensor),
    )


def mode_key(modules: Sequence[nn.Module], device_type: str) -> Hashable:
    """Which mode the block and torch are in: training flags, active adapters, autocast, kernels that may be taken."""
    autocast = torch.is_autocast_enabled(device_type)
    return (
        tuple(module.training for module in modules),
        tuple(_switches(module) for module in modules if hasattr(module, "active_adapters")),
        torch.get_autocast_dtype(device_type) if autocast else None,
        _kernel_switches(),
    )


def _kernel_switches() -> Hashable:
    """What fused attention is chosen by: a graph has the kernel that was chosen when it was captured."""
    backends: Any = torch.backends.cuda  # that is their name, but they count on a CPU as well
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _plain(leaf: Any) -> Hashable:
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    raise CaptureError(f"argument of type {type(leaf).__name__} cannot be part of a graph")


def _is_empty_cache(leaf: Any) -> bool:
    """A transformers `Cache` handed to every layer in training although nothing is cached."""
    get_length = getattr(leaf, "get_seq_length", None)
    return callable(get_length) and get_length() == 0 and torch.is_grad_enabled()


def _stride_order(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: strides[dim]))
    return order, tuple(stride == 0 for stride in strides)


def _switches(module: nn.Module) -> Hashable:
    return tuple(str(getattr(module, name, None)) for name in PEFT_SWITCHES)
