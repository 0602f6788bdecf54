"""Builds what a workload names: the model by its source, and the actor update over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hilore_plan.integrations.builtin_models import build
from hilore_plan.profiler.environment import resolve_device
from hilore_plan.profiler.step import ActorStep
from hilore_plan.schema.record import Workload


@dataclass(frozen=True)
class Built:
    """A model, the actor update over it, and the vocabulary of its synthetic data."""

    model: nn.Module
    step: ActorStep
    vocab_size: int
    seed: int


def build_workload(workload: Workload, device: str, seed: int = 0) -> Built:
    """The workload's model in its dtype on `device`, with seeded data: equal in every process."""
    where = resolve_device(device)
    loaded = build(
        workload.source,
        dtype=workload.dtype,
        attention=workload.attention,
        lora_rank=workload.lora_rank,
        device=device,
        seed=seed,
    )
    step = ActorStep(loaded.model, workload, vocab_size=loaded.vocab_size, device=where, seed=seed)
    return Built(loaded.model, step, loaded.vocab_size, seed)


def resized(built: Built, workload: Workload) -> Built:
    """The same model and optimizer under an update of another size."""
    old = built.step
    torch.manual_seed(built.seed)
    step = ActorStep(
        built.model,
        workload,
        vocab_size=built.vocab_size,
        device=old.device,
        seed=built.seed,
        loss=old.loss,
        optimizer=old.optimizer,
    )
    return Built(built.model, step, built.vocab_size, built.seed)
