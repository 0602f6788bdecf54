"""A model in fp32 for a while: what calibration computes in, so that a codec's error is not lost in bf16's own noise.

In fp32 a cast to fp32 gives back the tensor itself, where in bf16 it makes another one that a plan may keep. Under
`DistinctCasts` it makes another one in fp32 as well, so that a block saves the same tensors in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NARROW = (torch.bfloat16, torch.float16)
_CASTS = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as}


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[bool]:
    """The model's bf16 and fp16 parameters and buffers are fp32 within; yields whether there are any.

    They are changed in place and brought back bit for bit: every bf16 or fp16 number is one of fp32 as well. Gradients
    must not be there, or they would be of another dtype than their parameters.
    """
    narrow = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in NARROW]
    dtypes = [tensor.dtype for tensor in narrow]
    for tensor in narrow:
        tensor.data = tensor.data.float()
    try:
        yield bool(narrow)
    finally:
        for tensor, dtype in zip(narrow, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


class DistinctCasts(TorchFunctionMode):
    """While it lasts, a cast to the dtype that a tensor has already makes a copy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs `func`, and copies what a cast has handed through."""
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and result is args[0] and result.is_floating_point():
            return torch.ops.aten._to_copy.default(result, dtype=result.dtype)
        return result
