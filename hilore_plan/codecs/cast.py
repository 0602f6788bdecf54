"""`cast`: float32 that is a plain upcast of bfloat16 or float16, kept narrow. What would lose anything is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_plan.codecs.base import refuses_dtype

NARROW = (torch.bfloat16, torch.float16)


class Cast:
    """The lossless codec, in the codecs' interface."""

    name = "cast"

    def refuses(self, tensor: Tensor) -> str | None:
        """Why the tensor cannot be narrowed: its dtype, or that its values would not come back bit for bit."""
        reason = refuses_dtype(tensor, (torch.float32,))
        if reason is None and narrow_dtype(tensor) is None:
            reason = "its values need all of their bits"
        return reason

    def bytes_for(self, elements: int, dtype: torch.dtype) -> int:
        """Half of float32's."""
        del dtype
        return 2 * elements

    def encode_flat(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The narrow tensor."""
        return (flat.to(narrow_dtype(flat) or NARROW[0]),)

    def decode_flat(self, parts: tuple[Tensor, ...], elements: int, dtype: torch.dtype) -> Tensor:
        """The wide one."""
        del elements
        return parts[0].to(dtype)


def narrow_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of which this float32 tensor is an upcast, bit for bit; None if there is none."""
    tensor = tensor.resolve_neg()
    bits = tensor.view(torch.int32)
    for dtype in NARROW:
        if torch.equal(tensor.to(dtype).float().view(torch.int32), bits):
            return dtype
    return None
