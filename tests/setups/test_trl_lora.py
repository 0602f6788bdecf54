"""Adapters in TRL's `GRPOTrainer`: LoRA of any rank, its variants, dropout, and several on one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from runtime.rig import assert_bit_equal
from setups.trl_runs import (
    ACCUMULATION,
    MARKS,
    STEPS,
    Setup,
    assert_as_planned,
    assert_plans_are_exact,
    lora,
    make_grpo,
    make_model,
    train,
)
from torch import nn

from hilore_plan.errors import PlanMismatchError
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.variants import Variants

pytestmark = MARKS


def input_gradients(model: nn.Module) -> nn.Module:
    model.enable_input_require_grads()  # type: ignore[operator]
    return model


def two_adapters(model: nn.Module) -> nn.Module:
    """One that is trained, beside another that is not."""
    from peft import get_peft_model

    adapted: Any = get_peft_model(model, lora())
    adapted.add_adapter("other", lora(r=2))
    adapted.set_adapter("default")
    return adapted


def both_active(model: nn.Module) -> nn.Module:
    """Both add to the output; one is trained."""
    from peft import get_peft_model

    adapted: Any = get_peft_model(model, lora(init_lora_weights=False))
    adapted.add_adapter("other", lora(r=2, init_lora_weights=False))
    adapted.base_model.set_adapter(["default", "other"])
    return adapted


def block_diagonal() -> Any:
    """A variant that adds to the layer's output in place."""
    from peft.tuners.lora.config import BdLoraConfig

    rows, columns = ["o_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"]
    return BdLoraConfig(target_modules_bd_a=rows, target_modules_bd_b=columns, nblocks=2)


PLAIN: dict[str, Any] = {}
SETUPS = {
    "lora": Setup(adapter=PLAIN),
    "no-checkpointing": Setup({"gradient_checkpointing": False}, adapter=PLAIN),
    "input-gradients": Setup({"gradient_checkpointing": False}, adapter=PLAIN, prepare=input_gradients),
    "rank-1": Setup(adapter={"r": 1}),
    "rank-64": Setup(adapter={"r": 64}),
    "dropout": Setup(adapter={"lora_dropout": 0.2}),
    "dropout-no-checkpointing": Setup({"gradient_checkpointing": False}, adapter={"lora_dropout": 0.2}),
    "dora": Setup(adapter={"use_dora": True}),
    "dora-dropout": Setup(adapter={"use_dora": True, "lora_dropout": 0.2}),
    "dora-autocast": Setup({"bf16": True}, adapter={"use_dora": True}),
    "adds-in-place": Setup(adapter={"use_bdlora": block_diagonal()}),
    "adds-in-place-autocast": Setup({"bf16": True}, adapter={"use_bdlora": block_diagonal()}),
    "rank-stabilised": Setup(adapter={"use_rslora": True}),
    "other-scale-in-each-block": Setup(adapter={"alpha_pattern": {r"layers\.1\..*": 2}, "init_lora_weights": False}),
    "other-rank-in-each-block": Setup(adapter={"rank_pattern": {r".*layers\.1\..*": 2}}),
    "queries-and-values": Setup(adapter={"target_modules": ["q_proj", "v_proj"]}),
    "last-block-only": Setup(adapter={"layers_to_transform": [1], "target_modules": ["q_proj", "down_proj"]}),
    "trained-embeddings": Setup(adapter={"modules_to_save": ["embed_tokens"]}),
    "reference-without-adapter": Setup({"beta": 0.04, "num_iterations": 2}, adapter=PLAIN),
    "autocast": Setup({"bf16": True}, adapter=PLAIN),
    "bf16-model": Setup(adapter=PLAIN, dtype=torch.bfloat16),
    "bf16-model-autocast-dropout": Setup({"bf16": True}, adapter={"lora_dropout": 0.2}, dtype=torch.bfloat16),
    "two-adapters": Setup(prepare=two_adapters),
    "two-adapters-and-a-reference": Setup({"beta": 0.04}, prepare=two_adapters),
    "two-adapters-at-once": Setup(prepare=both_active),
    "gpt2": Setup(adapter={"fan_in_fan_out": True}, family="gpt2-dropout"),
}  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_exact_plans_change_nothing(setup: Setup, tmp_path: Path, variants: Variants) -> None:
    assert_plans_are_exact(make_grpo, setup, tmp_path, variants=variants)


def test_a_plan_made_before_trl_adds_its_reference_adapter_fits(tmp_path: Path) -> None:
    from peft import get_peft_model

    def adapted(model: nn.Module) -> Any:
        return get_peft_model(model, lora())

    setup = Setup({"beta": 0.04}, prepare=adapted)
    plan = plans.make_plan(make_model(setup, tmp_path))
    plain, trainer = train(make_grpo(setup, tmp_path)), make_grpo(setup, tmp_path)
    assert "ref" in trainer.model.peft_config
    planned = train(trainer, plan)
    assert_bit_equal(planned.parameters, plain.parameters)
    assert_as_planned(planned, STEPS * ACCUMULATION)
    one_more = make_model(Setup(prepare=two_adapters), tmp_path)
    for name, parameter in one_more.named_parameters():
        parameter.requires_grad_("lora_" in name)
    with pytest.raises(PlanMismatchError, match=r"lora_A\.other\.weight"):
        apply(one_more, plan)
