"""Blocks made up at random, for hypothesis: a few moves, each of which makes a new value from earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from models import VOCABULARY, WIDTH, Case, Stack
from torch import Tensor, nn
from torch.nn import functional

HEADS = 2


@dataclass(frozen=True)
class Move:
    """One step of a forward: `one` and `other` say which values it reads, counted back from the newest."""

    kind: str
    one: int = 0
    other: int = 1


@dataclass(frozen=True)
class Model:
    """A model of equal random blocks: what they do, in which dtype, and whether half of their layers are frozen.

    With `waste` only the last value counts, and others may have been made for nothing.
    """

    moves: tuple[Move, ...]
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    waste: bool = True
    depth: int = 2

    def case(self) -> Case:
        """The model as a case, for `gradients` and `make_inputs`."""
        return Weighted("random", self.build)

    def build(self, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
        """The same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Stack(lambda: RandomBlock(self.moves, waste=self.waste), self.depth).to(dtype or self.dtype).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (self.frozen and ".even." in name))
        return model


class Weighted(Case):
    """Any length will do, one token included: the loss is a weighted sum of all outputs."""

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """A loss with gradients of either sign."""
        output = model(**inputs).float()
        return (output * torch.cos(torch.arange(output.numel())).view_as(output)).sum()


class RandomBlock(nn.Module):
    """Carries out moves; every second one that has weights keeps them in `even`."""

    def __init__(self, moves: tuple[Move, ...], *, waste: bool = True) -> None:
        super().__init__()
        self.moves = moves
        self.waste = waste
        self.out = nn.Linear(WIDTH, WIDTH)
        self.even, self.odd = nn.ModuleDict(), nn.ModuleDict()
        for number, move in enumerate(moves):
            if move.kind in WEIGHTS:
                (self.odd if number % 2 else self.even)[str(number)] = WEIGHTS[move.kind]()

    def forward(self, x: Tensor) -> Tensor:
        values, used = [x], {0}
        for number, move in enumerate(self.moves):
            inner = self.odd if number % 2 else self.even
            places = [len(values) - 1 - place % len(values) for place in (move.one, move.other)]
            layer: tuple[Any, ...] = (inner[str(number)],) if move.kind in WEIGHTS else ()
            values.append(MOVES[move.kind](*layer, *(values[place] for place in places)))
            used.update(places if move.kind in BOTH else places[:1])
        last = values[-1]
        if not self.waste:
            for number in sorted(set(range(len(values) - 1)) - used):
                last = last + values[number]
        return x + self.out(torch.tanh(last))


def _rms(v: Tensor, _: Tensor) -> Tensor:
    wide = v.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(v.dtype)


def _attend(v: Tensor, w: Tensor) -> Tensor:
    q, k = (t.view(*t.shape[:2], HEADS, -1).transpose(1, 2) for t in (v, w))
    out = functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    return out.transpose(1, 2).reshape(v.shape)


def _scores(v: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(v @ w.transpose(-1, -2) / WIDTH, dim=-1) @ w


def _gate(layer: nn.Module, v: Tensor, _: Tensor) -> Tensor:
    gate, up = layer(v).chunk(2, dim=-1)
    return functional.silu(gate) * up


def _pinned(layer: nn.Module, v: Tensor, w: Tensor) -> Tensor:
    """Saves a slice, which keeps all of what it is a slice of."""
    return w * layer(v)[..., 3 : 3 + WIDTH]


def _spread(v: Tensor, w: Tensor) -> Tensor:
    """Saves an expanded tensor."""
    return w * torch.tanh(v.mean(1, keepdim=True)).expand_as(w)


def _shift(v: Tensor, w: Tensor) -> Tensor:
    return torch.cat([v[:, 1:], v[:, :1]], dim=1) * torch.sigmoid(w)


def _flip(v: Tensor, w: Tensor) -> Tensor:
    return (v.transpose(0, 1) * w.transpose(0, 1).cos()).transpose(0, 1)


def _in_place(v: Tensor, w: Tensor) -> Tensor:
    h = v * 2.0
    h.mul_(torch.sigmoid(w))
    h[..., :3].add_(1.0)
    return h.relu_()


def _added(layer: nn.Module, v: Tensor, w: Tensor) -> Tensor:
    out = layer(v)
    out += w
    return out


MOVES: dict[str, Callable[..., Tensor]] = {
    "linear": lambda layer, v, w: layer(v),
    "norm": lambda layer, v, w: layer(v),
    "gate": _gate,
    "pinned": _pinned,
    "added": _added,
    "rms": _rms,
    "attend": _attend,
    "scores": _scores,
    "spread": _spread,
    "shift": _shift,
    "flip": _flip,
    "in place": _in_place,
    "dropout": lambda v, w: functional.dropout(v, 0.2),
    "gelu": lambda v, w: functional.gelu(v),
    "tanh": lambda v, w: torch.tanh(v),
    "add": lambda v, w: v + w,
    "multiply": lambda v, w: v * w,
    "choose": lambda v, w: torch.where(v > w, v, w),
}
WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gate": lambda: nn.Linear(WIDTH, 2 * WIDTH, bias=False),
    "pinned": lambda: nn.Linear(WIDTH, 2 * WIDTH),
    "added": lambda: nn.Linear(WIDTH, WIDTH),
}
# moves that read two values
BOTH = ("pinned", "added", "attend", "scores", "spread", "shift", "flip", "in place", "add", "multiply", "choose")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def moves(max_size: int = 6) -> st.SearchStrategy[tuple[Move, ...]]:
    """A few moves of any kind."""
    move = st.builds(Move, st.sampled_from(sorted(MOVES)), st.integers(0, 2), st.integers(0, 3))
    return st.lists(move, min_size=1, max_size=max_size).map(tuple)


def models(
    dtypes: tuple[torch.dtype, ...] = DTYPES, waste: st.SearchStrategy[bool] | None = None
) -> st.SearchStrategy[Model]:
    """Models of random blocks."""
    return st.builds(Model, moves(), st.sampled_from(dtypes), st.booleans(), st.booleans() if waste is None else waste)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9))


def token_ids(shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Inputs of a model, `[batch, length]`."""
    return {"input_ids": torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))}
