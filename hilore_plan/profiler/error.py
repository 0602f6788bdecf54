"""The error that compressed units cause in a block's own gradients and in what it hands on to the blocks below.

One forward of the model is recorded; then the backward of one block is run again and again, each time with some units
compressed. With g the exact gradients and g' the approximate ones of the block's parameters, and d and d' those of its
inputs,

    local = |g' - g|^2,        propagated = |d' - d|^2 / |d|^2 * |gradient of everything below|^2.

Everything below is linear in d: the second one is what the error would be if it went down undamped. It does not: errors
of single tokens cancel where gradients add up over all of them. How much of an error arrives is what its own gradient
below comes to, for which the backward of the blocks below is run with d' - d.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hilore_plan.profiler.batches import CalibrationBatch
from hilore_plan.profiler.tape import Tape

Gradients = list[torch.Tensor | None]

# norms whose squares, and those of elements ten thousand times smaller, are normal numbers in fp32
_SAFE = 1e-14


@dataclass(frozen=True)
class Parts:
    """A model's trainable parameters: those of each block, and those outside. One that is tied counts once."""

    blocks: Sequence[nn.Module]
    inside: list[list[nn.Parameter]]
    outside: list[nn.Parameter]

    @property
    def everything(self) -> list[nn.Parameter]:
        """All of them."""
        return [*(parameter for block in self.inside for parameter in block), *self.outside]


def parts_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Parts:
    """The trainable parameters of a model with these blocks."""
    seen: set[int] = set()

    def fresh(module: nn.Module) -> list[nn.Parameter]:
        found = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, found))
        return found

    inside = [fresh(block) for block in blocks]
    return Parts(blocks, inside, fresh(model))


class Recorded:
    """One micro-batch's forward, and its exact backward cut up by blocks.

    Args:
        model: within `in_fp32`.
        parts: its parameters.
        tapes: of its blocks, within `taped`.
        batch: the micro-batch.
    """

    def __init__(self, model: nn.Module, parts: Parts, tapes: Sequence[Tape], batch: CalibrationBatch) -> None:
        self.parts = parts
        self.tapes = tapes
        self.loss = batch.loss(model)
        outputs = [output for tape in tapes for output in tape.outputs]
        found = gradients(self.loss, [*outputs, *parts.outside])
        upstream = iter(found[: len(outputs)])
        self.upstream = [[next(upstream) for _ in tape.outputs] for tape in tapes]
        self.outside = found[len(outputs) :]

    def block(self, index: int) -> tuple[Gradients, Gradients]:
        """Gradients of one block's parameters and inputs, with whatever its tape has replaced."""
        tape, parameters = self.tapes[index], self.parts.inside[index]
        pairs = [(out, up) for out, up in zip(tape.outputs, self.upstream[index], strict=True) if up is not None]
        found = gradients([out for out, _ in pairs], [*parameters, *tape.inputs], [up for _, up in pairs])
        return found[: len(parameters)], found[len(parameters) :]

    def whole(self) -> Gradients:
        """Gradients of all parameters in the order of `Parts.everything`, with whatever the tapes have replaced."""
        return gradients(self.loss, self.parts.everything)

    def below(self, index: int, inputs: Gradients) -> Gradients:
        """Gradients of all parameters below a block that follow from those of its inputs; None where there are none."""
        parameters = [*(p for block in self.parts.inside[:index] for p in block), *self.parts.outside]
        pairs = [(x, d) for x, d in zip(self.tapes[index].inputs, inputs, strict=True) if d is not None and x.grad_fn]
        return gradients([x for x, _ in pairs], parameters, [d for _, d in pairs]) if pairs else []


def gradients(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    upstream: Sequence[torch.Tensor] | None = None,
) -> Gradients:
    """`torch.autograd.grad` that keeps the graph; None where there is no gradient."""
    if not inputs or (isinstance(outputs, list) and not outputs):
        return [None] * len(inputs)
    return list(torch.autograd.grad(outputs, inputs, upstream, retain_graph=True, allow_unused=True))


def squared(tensors: Sequence[torch.Tensor | None]) -> float:
    """The sum of all squares."""
    return sum(_norm(tensor) ** 2 for tensor in tensors if tensor is not None)


def _norm(tensor: torch.Tensor) -> float:
    """In fp32 as the tensor is, which is four times as fast; in fp64 where squares may leave the range of fp32."""
    norm = float(torch.linalg.vector_norm(tensor))
    return norm if _SAFE < norm < 1 / _SAFE else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def squared_distance(some: Gradients, others: Gradients) -> float:
    """The sum of all squared differences; a gradient that only one side has is a difference."""
    return squared(list(differences(some, others)))


def differences(some: Gradients, others: Gradients) -> Iterator[torch.Tensor | None]:
    """One by one, up to the sign; None where both are."""
    for one, other in zip(some, others, strict=True):
        yield one if other is None else other if one is None else one - other
