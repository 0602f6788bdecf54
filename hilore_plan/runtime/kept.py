"""How the values of a frame are kept: whole, narrowed without loss, or compressed by a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hilore_plan.codecs.base import Codec, decode, encode
from hilore_plan.graph.sizes import Geometry
from hilore_plan.runtime.changed import changed_in_place


class Kept:
    """A tensor that a recovery program reads, as the value that it is a view of."""

    __slots__ = ("geometry", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, geometry: Geometry) -> None:
        # what inference_mode made can be changed without a trace (R2): keep a copy of it
        self.tensor = tensor.clone() if tensor.is_inference() else tensor.detach()  # R1
        self.version = self.tensor._version
        self.geometry = geometry

    def base(self) -> torch.Tensor:
        """The whole value.

        Raises:
            RecoveryError: it has been changed in place.
        """
        if self.tensor._version != self.version:  # R2
            raise changed_in_place(f"a kept value of shape {list(self.geometry[0])}")
        return self.tensor.as_strided(*self.geometry)


class Narrowed:
    """A value kept in the narrow dtype of which it is a plain upcast; widened once (R3)."""

    __slots__ = ("dtype", "geometries", "narrow", "wide")

    def __init__(self, value: torch.Tensor, narrow: torch.dtype, geometries: Sequence[Geometry]) -> None:
        self.narrow = value.to(narrow)
        self.dtype = value.dtype
        self.geometries = geometries
        self.wide: torch.Tensor | None = None

    def base(self) -> torch.Tensor:
        """The whole value."""
        if self.wide is None:
            self.wide = self.narrow.to(self.dtype)
        return self.wide

    def take(self, slot: int) -> torch.Tensor:
        """See `Owner.take`."""
        return self.base().as_strided(*self.geometries[slot])


class Compressed:
    """A value kept in a codec's format; decoded once (R3)."""

    __slots__ = ("encoded", "geometries", "whole")

    def __init__(self, value: torch.Tensor, codec: Codec, geometries: Sequence[Geometry]) -> None:
        self.encoded = encode(codec, value)
        self.geometries = geometries
        self.whole: torch.Tensor | None = None

    def base(self) -> torch.Tensor:
        """The whole value, as nearly as the codec can tell."""
        if self.whole is None:
            self.whole = decode(self.encoded)
        return self.whole

    def take(self, slot: int) -> torch.Tensor:
        """See `Owner.take`."""
        return self.base().as_strided(*self.geometries[slot])


Source = Kept | Narrowed | Compressed
