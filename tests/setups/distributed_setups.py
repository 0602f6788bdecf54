"""The ways to train with several processes that hilore promises to survive: one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models import FAMILIES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hilore_plan.integrations.lora import add_lora

RANKS, BLOCKS = 2, 2
CASE = FAMILIES["llama"]
SIZES = {"num_hidden_layers": BLOCKS, "hidden_size": 32, "intermediate_size": 64}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Wrap = Callable[[nn.Module], nn.Module]
Sync = Callable[[nn.Module, bool], AbstractContextManager[Any]]


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def ddp_sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else model.no_sync()


def fsdp2(model: nn.Module, *, blocks: bool = True, parts: bool = False, **options: Any) -> nn.Module:
    """FSDP2 for each block, or for their parts, and around all of them."""
    options = {**options, "mesh": init_device_mesh("cpu", (RANKS,))}
    for layer in layers_of(model) if blocks else ():
        for part in (layer.self_attn, layer.mlp) if parts else ():
            fully_shard(part, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@contextmanager
def fsdp2_sync(model: nn.Module, last: bool, *, resharded: bool = True) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(resharded or last)
    yield


def always(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients are averaged after each micro-batch."""
    return nullcontext()


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == BLOCKS)


@dataclass(frozen=True)
class Setup:
    """One way to train with several processes.

    Args:
        wrap: what spreads the model over the ranks.
        sync: the context of one micro-batch, told whether it is the last of its step.
        lora: rank of the adapters on a frozen model; None: all parameters are trained.
        dtype: of the parameters.
        computes: the dtype to which a policy casts them in forward; None: it does not.
        autocast: whether forward runs under bf16 autocast.
        attach_first: whether the plan is in the model before it is wrapped.
        falls_back: whether no block can be captured, so that all are checkpointed.
    """

    wrap: Wrap
    sync: Sync = always
    lora: int | None = None
    dtype: torch.dtype = torch.float32
    computes: torch.dtype | None = None
    autocast: bool = False
    attach_first: bool = False
    falls_back: bool = False

    def build(self) -> nn.Module:
        """The model before it is wrapped; the same in each rank and each time."""
        model = CASE.build(dtype=self.dtype, **SIZES)
        return model if self.lora is None else _with_adapters(model, self.lora)

    def build_as_computed(self) -> nn.Module:
        """The model as it is in forward, which is how a plan has it: no longer sharded, and of the policy's dtype."""
        return self.build() if self.computes is None else self.build().to(self.computes)

    def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return CASE.loss(model, inputs)


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    adapted = add_lora(model, rank, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros hide what is wrong with the gradient of A
            parameter.data.normal_(std=0.1, generator=generator)
    return adapted.train()


SETUPS: dict[str, Setup] = {
    "ddp": Setup(ddp),
    "ddp-no-sync": Setup(ddp, ddp_sync),
    "ddp-static-graph-and-views-of-buckets": Setup(partial(ddp, static_graph=True, gradient_as_bucket_view=True)),
    "ddp-unused-parameters": Setup(partial(ddp, find_unused_parameters=True)),
    "ddp-autocast": Setup(ddp, autocast=True),
    "ddp-lora": Setup(ddp, ddp_sync, lora=4),
    "ddp-lora-bf16": Setup(ddp, lora=4, dtype=torch.bfloat16),
    "ddp-around-a-planned-model": Setup(ddp, attach_first=True),
    "fsdp2-resharded-after-forward": Setup(partial(fsdp2, reshard_after_forward=True)),
    "fsdp2-whole-after-forward": Setup(partial(fsdp2, reshard_after_forward=False)),
    "fsdp2-one-group-resharded": Setup(partial(fsdp2, blocks=False, reshard_after_forward=True)),
    "fsdp2-mixed-precision": Setup(partial(fsdp2, mp_policy=BF16), computes=torch.bfloat16),
    "fsdp2-accumulated": Setup(fsdp2, fsdp2_sync),
    "fsdp2-accumulated-without-resharding": Setup(fsdp2, partial(fsdp2_sync, resharded=False)),
    "fsdp2-offloaded": Setup(partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "fsdp2-lora": Setup(fsdp2, lora=4),
    "fsdp2-lora-mixed-precision": Setup(partial(fsdp2, mp_policy=BF16), fsdp2_sync, lora=4, computes=torch.bfloat16),
    "fsdp2-around-a-planned-model": Setup(fsdp2, attach_first=True),
    "fsdp2-parts-of-blocks": Setup(partial(fsdp2, parts=True), falls_back=True),
}
