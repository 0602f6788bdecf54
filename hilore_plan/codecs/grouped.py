"""A grouped format as a codec: memory for the parts, the last group that is not full, and who computes.

On a CUDA device the Triton kernels compute, on the CPU the compiled formulas, anywhere else (and on tensors that are
not plain ones, such as fake tensors) the formulas as they stand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from hilore_plan.codecs.base import refuses_dtype
from hilore_plan.codecs.format import Format
from hilore_plan.codecs.fused import Fused

Kernel = Callable[..., None]


class GroupCodec:
    """A codec made of a format.

    Args:
        form: the format.
        fused: where compiled formulas are kept; None computes by the formulas as they stand, on any device.
        triton: the module with the format's Triton kernels.
    """

    def __init__(self, form: Format, fused: Fused | None = None, triton: str = "") -> None:
        self.format = form
        self.name = form.name
        self._fused = fused
        self._triton = triton

    def refuses(self, tensor: Tensor) -> str | None:
        """See `Codec.refuses`."""
        return refuses_dtype(tensor)

    def bytes_for(self, elements: int, dtype: torch.dtype) -> int:
        """See `Codec.bytes_for`: whole groups, whatever the dtype."""
        del dtype
        return self.format.count(elements) * self.format.group_bytes

    def encode_flat(self, flat: Tensor) -> tuple[Tensor, ...]:
        """See `Codec.encode_flat`: codes `[n, width]`, then each side `[n]`."""
        form = self.format
        elements = flat.numel()
        parts = form.allocate(elements, flat.device)
        kernel = self._kernel(form.encode, flat, flat.dtype)
        whole, rest = divmod(elements, form.group)
        if rest or whole == 1:
            whole = _encode_end(form, kernel, flat, parts)
            flat = flat[: whole * form.group]
            if whole:
                kernel(flat.view(whole, form.group), *(part[:whole] for part in parts))
        elif whole:
            kernel(flat.view(whole, form.group), *parts)
        return parts

    def decode_flat(self, parts: tuple[Tensor, ...], elements: int, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode_flat`. The storage is that of whole groups."""
        form = self.format
        count = form.count(elements)
        out = torch.empty((count, form.group), dtype=dtype, device=parts[0].device)
        kernel = self._kernel(form.decode, parts[0], dtype) if count > 1 else form.decode
        if count:
            kernel(*form.runs_of(out), *parts)
        return out.view(-1)[:elements]

    def _kernel(self, formula: Kernel, tensor: Tensor, dtype: torch.dtype) -> Kernel:
        """Who computes for this tensor, given two groups or more."""
        if self._fused is None or type(tensor) is not Tensor:
            return formula
        if tensor.is_cuda:
            return _triton_kernel(self._triton, formula.__name__)
        return self._fused.find(self.format, formula, dtype) if tensor.is_cpu else formula


def _encode_end(form: Format, kernel: Kernel, flat: Tensor, parts: tuple[Tensor, ...]) -> int:
    """Encode the end of `flat` that is less than two groups, in memory of two; how many groups come before it.

    Two, because compiled formulas take no fewer.
    """
    elements = flat.numel()
    before = elements // form.group
    before = 0 if before == 1 else before
    rest = elements - before * form.group
    groups = flat.new_zeros((2, form.group))
    groups.view(-1)[:rest] = flat[before * form.group :]
    spare = form.allocate(2 * form.group, flat.device)
    kernel(groups, *spare)
    for part, end in zip(parts, spare, strict=True):
        part[before:] = end[: len(part) - before]
    return before


@functools.cache
def _triton_kernel(module: str, name: str) -> Kernel:
    kernel: Kernel = getattr(import_module(module), name)
    return kernel
