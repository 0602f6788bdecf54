"""Full fine-tuning in TRL's `GRPOTrainer`: every loss, and what else its config offers, with and without a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from setups.trl_runs import MARKS, Setup, assert_plans_are_exact, make_grpo
from torch import nn

from hilore_plan.exposure.losses import LOSS_TYPES
from hilore_plan.runtime.variants import Variants

pytestmark = MARKS


def frozen_embeddings(model: nn.Module) -> nn.Module:
    """Only what comes after them is trained: the first block's input needs no gradient."""
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return model


EXTRA = {"luspo": {"importance_sampling_level": "sequence"}}  # the only level that TRL lets it have
SETUPS = {
    **{f"loss-{loss}": Setup({"loss_type": loss, **EXTRA.get(loss, {})}) for loss in LOSS_TYPES},
    "gspo": Setup({"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "no-checkpointing": Setup({"gradient_checkpointing": False}),
    "two-iterations": Setup({"num_iterations": 2}),
    "several-steps-from-one-generation": Setup({"steps_per_generation": 4}),
    "reference-model": Setup({"beta": 0.04}),
    "reference-model-that-follows": Setup({"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "no-accumulation": Setup({"gradient_accumulation_steps": 1}),
    "three-accumulated": Setup({"gradient_accumulation_steps": 3}),
    "autocast": Setup({"bf16": True}),
    "autocast-two-iterations": Setup({"bf16": True, "num_iterations": 2, "beta": 0.04}),
    "bf16": Setup(dtype=torch.bfloat16),
    "bf16-head-in-fp32": Setup({"cast_lm_head_to_fp32": True}, dtype=torch.bfloat16),
    "entropy-bonus": Setup({"entropy_coef": 0.01}),
    "top-entropy": Setup({"top_entropy_quantile": 0.5}),
    "two-sided-clip": Setup({"delta": 1.5, "num_iterations": 2}),
    "off-policy-mask": Setup({"off_policy_mask_threshold": 0.5, "num_iterations": 2}),
    "truncated-are-masked": Setup({"mask_truncated_completions": True, "max_completion_length": 200}),
    "eager-attention": Setup(attention="eager"),
    "frozen-embeddings": Setup(prepare=frozen_embeddings),
    "frozen-embeddings-no-checkpointing": Setup({"gradient_checkpointing": False}, prepare=frozen_embeddings),
    "dropout": Setup(family="gpt2-dropout"),
    "dropout-autocast": Setup({"bf16": True}, family="gpt2-dropout"),
    "experts": Setup({"router_aux_loss_coef": 0.01}, family="qwen3_moe", dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_exact_plans_change_nothing(setup: Setup, tmp_path: Path, variants: Variants) -> None:
    assert_plans_are_exact(make_grpo, setup, tmp_path, variants=variants)
