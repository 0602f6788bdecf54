"""The actor update that is measured: micro-batches of synthetic GRPO data, forward, backward, clipping, AdamW.

The loss is GRPO's token loss with PPO's clip and the normaliser of DAPO (Yu et al., 2025, eq. 8): the sum over all
response tokens of the update, divided by their number. The data are on-policy, so the ratio is exactly 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.profiler.head import HeadScale, full_log_probs, fused_log_probs
from hilore_plan.profiler.memory import storage_bytes
from hilore_plan.schema.record import GradientState, Workload

_CLIP = 0.2
_MAX_NORM = 1.0
_LEARNING_RATE = 1e-6


class Enterable(Protocol):
    """What `ActorStep` needs of a runtime."""

    def microbatch(self, *, tokens: int | None = None, exposure: float | None = None) -> AbstractContextManager[object]:
        """Selects the plan's entry for one micro-batch."""


@dataclass(frozen=True)
class MicroBatch:
    """`ids` (`[batch, prompt + response]`), an advantage per row, and the response tokens of the whole update."""

    ids: torch.Tensor
    advantages: torch.Tensor
    prompt_tokens: int
    update_tokens: int

    @property
    def first(self) -> int:
        """Position of the first response token that has a position before it to be predicted from."""
        return max(self.prompt_tokens, 1)

    @property
    def targets(self) -> torch.Tensor:
        """The response tokens, `[batch, response]`."""
        return self.ids[:, self.first :]

    @property
    def exposure(self) -> float:
        """The L2 norm of the coefficients `-A / N`, one for each response token: the ratio is 1."""
        square = float(self.advantages.double().square().sum()) * self.targets.shape[1]
        return math.sqrt(square) / max(self.update_tokens, 1)


Loss = Callable[[nn.Module, MicroBatch], torch.Tensor]


def make_micro_batches(workload: Workload, *, vocab_size: int, device: torch.device, seed: int) -> list[MicroBatch]:
    """Seeded micro-batches with advantages of both signs, every token valid."""
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.batch, workload.prompt_tokens + workload.response_tokens)
    positions = workload.response_tokens - (workload.prompt_tokens == 0)
    update_tokens = workload.micro_batches * workload.batch * positions
    batches = []
    for index in range(workload.micro_batches):
        ids = torch.randint(0, vocab_size, shape, generator=generator)
        signs = 1.0 - 2.0 * ((torch.arange(workload.batch) + index) % 2)
        advantages = signs * (0.5 + torch.rand(workload.batch, generator=generator))
        batches.append(MicroBatch(ids.to(device), advantages.to(device), workload.prompt_tokens, update_tokens))
    return batches


def grpo_loss(log_probs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """`-sum min(r A, clip(r) A) / N` over `log_probs` (`[batch, response]`), `r = exp(logp - old)`, old = logp."""
    ratio = torch.exp(log_probs - log_probs.detach())
    advantages = batch.advantages[:, None]
    clipped = torch.clamp(ratio, 1 - _CLIP, 1 + _CLIP) * advantages
    return -torch.minimum(ratio * advantages, clipped).sum() / max(batch.update_tokens, 1)


def causal_lm_of(model: nn.Module) -> nn.Module:
    """The causal language model inside wrappers: PEFT's by `get_base_model`, DDP's by `module`."""
    while not hasattr(model, "get_output_embeddings") or hasattr(model, "get_base_model"):
        wrapped: Any = model
        inner = wrapped.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise UsageError(
                f"{type(model).__name__} is not a causal language model: it has no get_output_embeddings()",
                "pass loss=, a function of the model and a micro-batch, or a Hugging Face causal LM",
            )
        model = inner
    return model


def head_scale_of(model: nn.Module) -> HeadScale:
    """Scale and softcap of a model's logits from its configuration, under the names that families use."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)
    factor = next((v for name in ("logit_scale", "lm_head_multiplier") if (v := getattr(config, name, None))), None)
    scale = 1 / divisor if divisor else factor
    return HeadScale(float(scale or 1.0), getattr(config, "final_logit_softcapping", None))


def fused_loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """The loss with a fused head: response positions only, never the complete logits."""
    language_model: Any = causal_lm_of(model)
    hidden = language_model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    head = language_model.get_output_embeddings()
    rows = hidden[:, batch.first - 1 : -1].reshape(-1, hidden.shape[-1])
    scale = head_scale_of(language_model)
    flat = fused_log_probs(rows, head.weight, head.bias, batch.targets.reshape(-1), scale)
    return grpo_loss(flat.view(batch.targets.shape), batch)


def full_loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """The loss with complete logits of the response, as trainers before the fused head make them."""
    kept = batch.targets.shape[1] + 1
    logits = model(input_ids=batch.ids, use_cache=False, logits_to_keep=kept).logits[:, -kept:-1]
    return grpo_loss(full_log_probs(logits, batch.targets), batch)


def relative_exposures(batches: Sequence[MicroBatch]) -> list[float]:
    """The exposures of micro-batches in units of their mean."""
    absolute = [batch.exposure for batch in batches]
    mean = sum(absolute) / len(absolute)
    return [value / mean if mean > 0 else 0.0 for value in absolute]


class ActorStep:
    """One actor update of a model, ready to be repeated.

    Args:
        model: in train mode, on `device`.
        workload: sizes, head, accumulation. With accumulation the gradients of all micro-batches add up, and are
            followed by one optimizer step; without it every micro-batch is an update of its own. Before each update
            gradients are freed, as `zero_grad` does by default.
        vocab_size: token ids lie below it.
        loss: replaces the head's loss, for modules that are not Hugging Face causal LMs.
        optimizer: one over the model's trainable parameters, to go on with; AdamW by default.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        *,
        vocab_size: int,
        device: torch.device,
        seed: int = 0,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self.workload = workload
        self.device = device
        self.batches = make_micro_batches(workload, vocab_size=vocab_size, device=device, seed=seed)
        self.exposures = relative_exposures(self.batches)
        self.loss: Loss = loss or {"fused": fused_loss, "full": full_loss}[workload.head]
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        if not self.trainable:
            raise UsageError("the model has no parameter that requires a gradient", "unfreeze some, or add LoRA")
        self.optimizer = optimizer or torch.optim.AdamW(self.trainable, lr=_LEARNING_RATE)

    def step(self, runtime: Enterable | None = None) -> None:
        """One complete actor update."""
        alone = not self.workload.accumulation
        last = len(self.batches) - 1
        for index in range(len(self.batches)):
            if alone or index == 0:
                self.begin("none")
            self.backward(index, runtime)
            if alone or index == last:
                self.update()

    def short(self, runtime: Enterable | None = None) -> None:
        """The last micro-batch of an update, and the optimizer's step; as `begin` left it. All are of one size."""
        self.backward(0, runtime)
        self.update()

    @property
    def updates(self) -> int:
        """How often the optimizer steps in one actor update."""
        return 1 if self.workload.accumulation else len(self.batches)

    def begin(self, gradients: GradientState) -> None:
        """Frees all gradients, or has one of zeros for every trainable parameter."""
        self.optimizer.zero_grad(set_to_none=gradients == "none")
        if gradients == "live":
            for parameter in self.trainable:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def backward(self, index: int = 0, runtime: Enterable | None = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns the loss."""
        with self.entering(runtime, index):
            loss = self.loss(self.model, self.batches[index])
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def entering(self, runtime: Enterable | None, index: int) -> AbstractContextManager[object]:
        """The runtime's context for one micro-batch, if there is a runtime."""
        if runtime is None:
            return nullcontext()
        return runtime.microbatch(tokens=self.workload.tokens, exposure=self.exposures[index])

    def update(self) -> None:
        """Clipping and the optimizer's step."""
        torch.nn.utils.clip_grad_norm_(self.trainable, _MAX_NORM)
        self.optimizer.step()

    def parameter_bytes(self) -> int:
        """Parameters and buffers."""
        return storage_bytes([*self.model.parameters(), *self.model.buffers()])

    def gradient_bytes(self) -> int:
        """What a gradient for every trainable parameter takes."""
        return sum(p.numel() * p.element_size() for p in self.trainable)

    def optimizer_bytes(self) -> int:
        """The optimizer's state; 0 before the first step."""
        return storage_bytes(_tensors_in(self.optimizer.state))

    def batch_bytes(self) -> int:
        """The synthetic data."""
        return storage_bytes(t for batch in self.batches for t in (batch.ids, batch.advantages))

    def live_bytes(self) -> int:
        """Everything of this update that is allocated between two steps."""
        gradients = [p.grad for p in self.trainable if p.grad is not None]
        state = list(_tensors_in(self.optimizer.state))
        data = [t for batch in self.batches for t in (batch.ids, batch.advantages)]
        return storage_bytes([*self.model.parameters(), *self.model.buffers(), *gradients, *state, *data])


def _tensors_in(state: Mapping[Any, Mapping[str, object]]) -> Iterator[torch.Tensor]:
    for entry in state.values():
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))
