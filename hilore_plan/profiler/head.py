"""The head of an actor update: log-probabilities of the response tokens, without ever holding their logits at once.

The vocabulary is taken in tiles. Forward folds each tile `z = hidden @ weight[tile].T` into a running log-sum-exp
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018); backward makes each tile again and turns it
into its gradient `(1[target] - softmax(z)) * g`. Trainers since TRL 1.15 compute their log-probabilities in this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_TILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class HeadScale:
    """What a model does to its logits: `softcap * tanh(scale * z / softcap)`, or `scale * z` without a softcap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The final logits, in float32 at least."""
        scaled = logits.to(_wide(logits.dtype)) * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def chain(self, gradient: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """Gradient of the raw logits from that of the `final` ones."""
        if self.softcap is not None:
            gradient = gradient * (1 - (final / self.softcap) ** 2)
        return gradient * self.scale


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tiles(rows: int, vocabulary: int) -> list[slice]:
    width = max(1, min(vocabulary, _TILE_BYTES // (4 * max(rows, 1))))
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


class FusedLogProbs(torch.autograd.Function):
    """Log-probabilities of `targets` (`[N]`) under `hidden` (`[N, H]`) and `weight` (`[V, H]`); float32 `[N]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: HeadScale,
    ) -> torch.Tensor:
        """See the class."""
        top = torch.full_like(targets, float("-inf"), dtype=_wide(hidden.dtype))
        total, chosen = torch.zeros_like(top), torch.zeros_like(top)
        for tile in _tiles(hidden.shape[0], weight.shape[0]):
            final = scale.apply(_tile_logits(hidden, weight, bias, tile))
            higher = torch.maximum(top, final.amax(1))
            total = total * torch.exp(top - higher) + torch.exp(final - higher[:, None]).sum(1)
            top = higher
            chosen += _picked(final, targets, tile)
            del final  # else it would be live beside the next tile
        normalizer = top + total.log()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.scale = scale
        return chosen - normalizer

    @staticmethod
    def backward(
        ctx: Any,
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Tile by tile: a tile's rows of the weight's gradient are complete at once, `hidden`'s gradient adds up."""
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden.dtype)) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        for tile in _tiles(hidden.shape[0], weight.shape[0]):
            final = ctx.scale.apply(_tile_logits(hidden, weight, bias, tile))
            grad = _tile_gradient(final, targets, normalizer, gradients[0], tile)
            grad = ctx.scale.chain(grad, final).to(hidden.dtype)
            del final
            if grad_hidden is not None:
                grad_hidden += grad @ weight[tile]
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[tile])
            if grad_bias is not None:
                grad_bias[tile] = grad.sum(0)
            del grad
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


def fused_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, scale: HeadScale
) -> torch.Tensor:
    """`FusedLogProbs` as a function: log-probabilities `[N]` of `targets`."""
    result: torch.Tensor = FusedLogProbs.apply(hidden, weight, bias, targets, scale)  # type: ignore[no-untyped-call]
    return result


def _tile_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: slice) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, weight[tile], None if bias is None else bias[tile])


def _picked(final: torch.Tensor, targets: torch.Tensor, tile: slice) -> torch.Tensor:
    """The target's logit where the target lies in this tile, else 0."""
    place = targets - tile.start
    inside = (place >= 0) & (place < final.shape[1])
    picked: torch.Tensor = final.gather(1, place.clamp(0, final.shape[1] - 1)[:, None])[:, 0] * inside
    return picked


def _tile_gradient(
    final: torch.Tensor, targets: torch.Tensor, normalizer: torch.Tensor, upstream: torch.Tensor, tile: slice
) -> torch.Tensor:
    """`(1[target] - softmax) * upstream` for one tile, `[N, tile]`."""
    grad = torch.exp(final - normalizer[:, None]).neg_()
    place = targets - tile.start
    inside = (place >= 0) & (place < grad.shape[1])
    grad.scatter_add_(1, place.clamp(0, grad.shape[1] - 1)[:, None], inside.to(grad.dtype)[:, None])
    return grad.mul_(upstream[:, None])


def full_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `targets` from complete `logits` (`[..., V]`): what trainers without a fused head hold."""
    return torch.log_softmax(logits.to(_wide(logits.dtype)), dim=-1).gather(-1, targets[..., None])[..., 0]
