"""Builds what a workload names: the model by its source, and the actor update over it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import nn

from hilore_plan.errors import DeviceError
from hilore_plan.integrations.builtin_models import build
from hilore_plan.profiler.step import ActorStep
from hilore_plan.schema.record import Workload


@dataclass(frozen=True)
class Built:
    """A model and the actor update over it."""

    model: nn.Module
    step: ActorStep


def build_workload(workload: Workload, device: str, seed: int = 0) -> Built:
    """The workload's model in its dtype on `device`, with seeded data: equal in every process."""
    options = {"dtype": workload.dtype, "attention": workload.attention, "lora_rank": workload.lora_rank}
    loaded = build(workload.source, device=device, seed=seed, **options)  # type: ignore[arg-type]
    step = ActorStep(loaded.model, workload, vocab_size=loaded.vocab_size, device=torch.device(device), seed=seed)
    return Built(loaded.model, step)
