"""LoRA adapters on a loaded model, as the PEFT package makes them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from hilore_plan.integrations.extras import require


def add_lora(model: nn.Module, rank: int, *, seed: int) -> nn.Module:
    """`model` with adapters of `rank` on every linear layer of its blocks; only the adapters require gradients."""
    peft = require("peft", "--lora-rank")
    layers = {type(module).__name__ for module in model.modules()}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out="Conv1D" in layers,  # GPT-2 keeps its weights transposed
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft 0.21 asks for a property that transformers 5.24 calls deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(seed)
        adapted: Any = peft.get_peft_model(model, config)
    result: nn.Module = adapted
    return result
