"""TRL's `SFTTrainer` and `DPOTrainer`, and transformers' own: no exposure is known, one bucket fits all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from setups.trl_runs import MARKS, Setup, assert_plans_are_exact, make_dpo, make_sft

from hilore_plan.runtime.variants import Variants

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")]

SFT = {
    "full": Setup(),
    "no-checkpointing": Setup({"gradient_checkpointing": False}),
    "dynamic": Setup({"loss_type": "dft"}),
    "prompts-count-too": Setup({"completion_only_loss": False}),
    "label-smoothing": Setup({"label_smoothing_factor": 0.1}),
    "wrapped": Setup({"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "autocast": Setup({"bf16": True}),
    "noisy-embeddings": Setup({"neftune_noise_alpha": 5.0}),
    "lora": Setup(adapter={}),
    "dora-dropout": Setup(adapter={"use_dora": True, "lora_dropout": 0.2}),
    "dropout": Setup(family="gpt2-dropout"),
    "experts": Setup(family="qwen3_moe", dtype=torch.bfloat16),
}
DPO = {
    "full": Setup(),
    "no-checkpointing": Setup({"gradient_checkpointing": False}),
    "ipo": Setup({"loss_type": "ipo"}),
    "two-losses": Setup({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "known-reference": Setup({"precompute_ref_log_probs": True}),
    "weighted": Setup({"use_weighting": True}),
    "autocast": Setup({"bf16": True}),
    "lora": Setup(adapter={}),
    "lora-dropout-autocast": Setup({"bf16": True}, adapter={"lora_dropout": 0.2}),
    "dropout": Setup({"disable_dropout": False}, family="gpt2-dropout"),
}


@pytest.mark.parametrize("setup", SFT.values(), ids=SFT)
def test_exact_plans_change_nothing_in_sft(setup: Setup, tmp_path: Path, variants: Variants) -> None:
    assert_plans_are_exact(make_sft, setup, tmp_path, variants=variants)


@pytest.mark.parametrize("setup", DPO.values(), ids=DPO)
def test_exact_plans_change_nothing_in_dpo(setup: Setup, tmp_path: Path, variants: Variants) -> None:
    assert_plans_are_exact(make_dpo, setup, tmp_path, variants=variants)
