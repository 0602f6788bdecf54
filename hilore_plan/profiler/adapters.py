"""LoRA adapters whose B is zero, moved a little off it.

With B = 0 the gradient of A is zero, and an error in it cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# of the norm of the weight that the adapter changes
SHARE = 0.01


@contextmanager
def perturbed_adapters(model: nn.Module, seed: int) -> Iterator[int]:
    """Every B that is zero is seeded noise within, such that B A is about 1 % of W; yields how many there are.

    B comes back bit for bit. Adapters are known by PEFT's names: `lora_A`, `lora_B`, `scaling` and `base_layer`.
    """
    found = [pair for module in model.modules() for pair in _zero_adapters(module)]
    kept = [b.detach().clone() for b, _ in found]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for b, deviation in found:
            b.copy_(torch.randn(b.shape, generator=generator) * deviation)
    try:
        yield len(found)
    finally:
        with torch.no_grad():
            for (b, _), before in zip(found, kept, strict=True):
                b.copy_(before)


def _zero_adapters(module: nn.Module) -> Iterator[tuple[torch.Tensor, float]]:
    """Each zero B of a module, and its noise's deviation s: |B A| is about s sqrt(out) |A| for B of `[out, rank]`."""
    adapted: Any = module
    if not all(hasattr(module, name) for name in ("lora_A", "lora_B", "scaling", "base_layer")):
        return
    for name, layer in adapted.lora_B.items():
        a = adapted.lora_A[name].weight.detach()
        if not layer.weight.any():
            target = SHARE * float(adapted.base_layer.weight.detach().norm()) / adapted.scaling[name]
            yield layer.weight, target / (float(a.norm()) * len(layer.weight) ** 0.5)
