"""What a codec is, and how a tensor of any layout goes through one.

A codec sees flat memory only: `encode` and `decode` here take care of sizes and strides, once for all codecs.

- A dense tensor, whatever the order of its strides, is coded in memory order without a copy and comes back with its
  own size and strides.
- An expanded dimension (stride 0) is coded once and comes back expanded.
- A view with gaps or overlaps is copied together first: it comes back with the same values, and with the strides that
  `torch.empty_like` would give it: the same order of dimensions, without the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hilore_plan.errors import CodecError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@runtime_checkable
class Codec(Protocol):
    """A format in which a saved tensor may be kept."""

    @property
    def name(self) -> str:
        """The name by which plans know it."""

    def refuses(self, tensor: Tensor) -> str | None:
        """Why this tensor cannot be kept in this format, in words; None if it can."""

    def bytes_for(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes that `elements` elements of `dtype` take once encoded, exactly: what `Encoded.nbytes` will be."""

    def encode_flat(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The encoded form of a contiguous tensor of one dimension. Each part owns its storage."""

    def decode_flat(self, parts: tuple[Tensor, ...], elements: int, dtype: torch.dtype) -> Tensor:
        """What `encode_flat` was given, as nearly as the format can tell: contiguous, `[elements]`, of `dtype`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the decoded elements lie: size and strides of the tensor, its dtype, and how many elements were coded."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in encoded form. `coder` made it and will decode it: no look-up by name in backward."""

    coder: Codec
    parts: tuple[Tensor, ...]
    layout: Layout

    @property
    def codec(self) -> str:
        """The codec's name."""
        return self.coder.name

    @property
    def nbytes(self) -> int:
        """Bytes of all parts' storages."""
        return sum(part.untyped_storage().nbytes() for part in self.parts)


def encode(codec: Codec, tensor: Tensor) -> Encoded:
    """The tensor in the codec's format.

    Args:
        codec: the format.
        tensor: any size and strides, `float16`, `bfloat16` or `float32`; never changed, and never kept.

    Raises:
        CodecError: the codec refuses the tensor.
    """
    reason = codec.refuses(tensor)
    if reason is not None:
        raise CodecError(f"codec {codec.name} refuses {describe(tensor)}: {reason}", "store it, or recompute it")
    flat, layout = flatten(tensor)
    return Encoded(codec, codec.encode_flat(flat), layout)


def decode(encoded: Encoded) -> Tensor:
    """The tensor again, in memory of its own, with its size, strides and dtype (see the module for views with gaps)."""
    layout = encoded.layout
    flat = encoded.coder.decode_flat(encoded.parts, layout.elements, layout.dtype)
    return flat.as_strided(layout.size, layout.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, Layout]:
    """The elements in memory order, `[elements]`, each once, and the layout that undoes it."""
    tensor = tensor.detach()
    size, stride = tuple(tensor.shape), tensor.stride()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()  # the sign is a flag, not in memory
    elif tensor.is_contiguous():
        return tensor.view(-1), Layout(size, stride, tensor.dtype, tensor.numel())
    compact = compact_strides(size, stride)
    elements = prod(n for n, step in zip(size, compact, strict=True) if step or n == 0)
    if compact != stride or tensor.stride() != stride:
        tensor = _copied(tensor, size, compact)
    return tensor.as_strided((elements,), (1,)), Layout(size, compact, tensor.dtype, elements)


def compact_strides(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides without gaps and overlaps, in the same order of dimensions.

    Dimensions of one element keep their stride, which means nothing, unless it is 0; expanded ones keep 0.
    """
    compact = list(stride)
    step = 1
    for dim in sorted(range(len(size)), key=lambda d: (stride[d], size[d] != 1, -d)):
        if stride[dim] and size[dim] > 1:
            compact[dim] = step
            step *= size[dim]
    return tuple(compact)


def _copied(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    once = tuple(1 if step == 0 and n > 1 else n for n, step in zip(size, stride, strict=True))
    copy = torch.empty_strided(once, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.as_strided(once, tensor.stride(), tensor.storage_offset()))


def describe(tensor: Tensor) -> str:
    """A tensor in words, for error messages."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"a {dtype} tensor of shape {list(tensor.shape)} on {tensor.device}"


def refuses_dtype(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str | None:
    """The refusals that all codecs share: the wrong dtype, or no plain strided memory."""
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {names}"
    if tensor.layout is not torch.strided:
        return "it takes dense memory only"
    if type(tensor) not in {Tensor, torch.nn.Parameter} and hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__} holds its elements in other tensors"
    return None
