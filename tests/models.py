"""The models that tests run on: every transformers family of `builtin_models`, and hand-written awkward blocks.

Each is a `Case`: a model with repeated blocks in `layers` (or where its family has them), inputs for it, and a loss
whose gradient reaches every parameter. Compare two runs on two builds with the same seed; `stateful` cases change
their own buffers in forward, so never on one build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from hilore_plan.integrations import families

BOTH = (torch.float32, torch.bfloat16)
VOCABULARY = 256
WIDTH = 32


@dataclass(frozen=True)
class Case:
    """One model: `build(dtype, seed)` makes it, in training mode; `padded` says whether it takes a padding mask."""

    name: str
    build: Callable[..., nn.Module]
    padded: bool = False
    random: bool = False
    stateful: bool = False
    dtypes: tuple[torch.dtype, ...] = BOTH
    least_length: int = field(default=4)

    def make_inputs(self, batch: int, length: int, seed: int, padding: bool = False) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model; with `padding`, each row is padded on the left by another amount."""
        generator = torch.Generator().manual_seed(seed)
        inputs = {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}
        if padding:
            if not self.padded:
                raise ValueError(f"{self.name} takes no padding mask")
            pads = torch.arange(1, batch + 1).clamp(max=length - 1)
            inputs["attention_mask"] = (torch.arange(length) >= pads[:, None]).long()
        return inputs

    def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """A GRPO-like loss: log-probabilities of the tokens, each with its own coefficient of either sign."""
        output = model(**inputs)
        logits = (output if isinstance(output, torch.Tensor) else output.logits)[:, :-1].float()
        targets = inputs["input_ids"][:, 1:]
        logp = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        coefficients = torch.cos(targets * 1.7 + torch.arange(targets.shape[1]))
        if "attention_mask" in inputs:
            coefficients = coefficients * inputs["attention_mask"][:, 1:]
        return (logp * coefficients).sum() / targets.numel()

    def gradients(self, model: nn.Module, inputs: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
        """The gradient of every parameter; random ops draw from `seed`."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        self.loss(model, inputs).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Stack(nn.Module):
    """Token ids through an embedding, `depth` blocks and a head; a block may return a tensor or `(hidden, extra)`."""

    def __init__(self, block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            out = layer(hidden)
            hidden = out if isinstance(out, torch.Tensor) else out[0] + 0.1 * out[1]
        return self.head(hidden)


class Plain(nn.Module):
    """Norm, up, activation, down, and the residual; what the awkward blocks below are variations of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class InPlace(Plain):
    """Changes intermediate values in place: by a scalar, a tensor, an activation, and through a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        gate = torch.sigmoid(h)
        h = h * 2.0
        h.mul_(gate)
        h[..., :3].add_(1.0)
        h.relu_()
        y = self.down(h)
        y += x
        return y


class Dropout(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(functional.gelu(self.up(self.norm(x))))
        return x + self.outer(self.down(torch.tanh(h)))


class Tied(nn.Module):
    """Two linear layers with one weight, used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.silu(self.second(torch.tanh(self.first(x))))
        return x + functional.linear(h, self.first.weight.t())


class Injected(Plain):
    """Needs a keyword-only tensor that a forward pre-hook of its own puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(self._inject, with_kwargs=True)

    @staticmethod
    def _inject(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = args[0]
        places = torch.arange(x.shape[1], dtype=torch.float32).to(x.dtype)
        return args, {**kwargs, "scale": torch.cos(places)[None, :, None]}

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)) * scale))


class Pair(Plain):
    """Returns `(hidden, gate)`; backward comes in through both."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = functional.gelu(self.up(self.norm(x)))
        gate = torch.sigmoid(h[..., :WIDTH])
        return x + self.down(h) * gate, gate


class Square(nn.Module):
    """Saves a square matrix that isn't symmetric, and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.tanh(self.left(x)), torch.sigmoid(self.right(x))
        matrix = (left.transpose(-1, -2) @ right).sum(0) / x.shape[1]
        product = torch.mm(matrix, matrix.t()) + torch.mm(matrix.t(), matrix.exp())
        return x + functional.linear(left, torch.tanh(product))


class Views(Plain):
    """Saves a slice that begins at an offset, an expanded tensor, and a value together with views of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        mean = torch.tanh(h.mean(1, keepdim=True)).expand_as(h)
        h = h * mean
        tail = h[:, 3:] * torch.sigmoid(h)[:, 3:]
        flipped = (h.transpose(0, 1) * h.transpose(0, 1).cos()).transpose(0, 1)
        return x + self.down(torch.cat([h[:, :3], tail], dim=1) + flipped)


class Buffered(Plain):
    """Keeps a running mean and counts its calls, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(2 * WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        self.calls += 1
        with torch.no_grad():
            self.running.mul_(0.9).add_(0.1 * h.mean((0, 1)))
        h = functional.gelu(h) * torch.cos(self.running + self.calls)
        return x + self.down(h)


class _Squash(torch.autograd.Function):
    """`y = scale * tanh(x)`; saves inputs and output."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * scale
        ctx.save_for_backward(x, scale, y)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale, y = ctx.saved_tensors
        inner = torch.tanh(x)
        return grad * (scale - y * inner), (grad * inner).sum((0, 1))


class Custom(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(_Squash.apply(functional.gelu(self.up(self.norm(x))), self.scale))


def _stack(block: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    def build(dtype: torch.dtype = torch.float32, seed: int = 0, depth: int = 3) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Stack(block, depth).to(dtype).train()

    return build


def _family(name: str) -> Callable[..., nn.Module]:
    def build(
        dtype: torch.dtype = torch.float32, seed: int = 0, attention: str = "sdpa", **overrides: object
    ) -> nn.Module:
        model = families.build_family(name, dtype=dtype, attention=attention, seed=seed, **overrides)
        model.config.use_cache = False
        return model.train()

    return build


# their grouped matrix products are captured in bf16 only: for fp32, torch has none on a CPU
EXPERTS = ("qwen3_moe", "mixtral")

FAMILIES: dict[str, Case] = {
    name: Case(
        name,
        _family(name),
        padded=True,
        random=name.endswith("dropout"),
        dtypes=(torch.bfloat16,) if name in EXPERTS else BOTH,
    )
    for name in families.FAMILIES
}

HAND_WRITTEN: dict[str, Case] = {
    case.name: case
    for case in (
        Case("plain", _stack(Plain)),
        Case("in_place", _stack(InPlace)),
        Case("dropout", _stack(Dropout), random=True),
        Case("tied", _stack(Tied)),
        Case("keyword_from_hook", _stack(Injected)),
        Case("tuple", _stack(Pair)),
        Case("square", _stack(Square)),
        Case("views", _stack(Views), least_length=5),
        Case("own_buffer", _stack(Buffered), stateful=True),
        Case("autograd_function", _stack(Custom)),
    )
}

MODELS: dict[str, Case] = {**FAMILIES, **HAND_WRITTEN}
