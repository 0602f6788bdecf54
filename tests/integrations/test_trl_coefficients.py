"""The closed forms against the loss that TRL really computes: `GRPOTrainer._compute_loss` on given log-probs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exposure.reference import ACCUMULATION, LONGEST, RANKS, STEPS_PER_GENERATION, Micro, Setting
from tolerances import COEFFICIENTS
from torch import Tensor

from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.losses import LOSS_TYPES, LossConfig
from hilore_plan.exposure.weights import importance_weights, off_policy_keep

# TRL rounds the temperatures to fp32: this one survives that, 1.05 would not
EXACT = {"sapo_temperature_neg": 1.125}
SETTINGS = {
    "on-policy": Setting({}, drift=None),
    "off-policy": Setting({"epsilon_high": 0.28}, drift=0.3),
    "delta": Setting({"delta": 1.4}, drift=0.5),
    "token-weights": Setting({}, weights="token"),
    "row-weights": Setting({}, weights="row"),
    "kl-k3": Setting({"beta": 0.04, "kl_estimator": "k3"}),
    "kl-k3_unbiased": Setting({"beta": 0.04}),
    "off-policy-mask": Setting({"off_policy_mask_threshold": 0.01}),
    "temperatures": Setting({"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5}, drift=0.5),
    "everything": Setting({"beta": 0.1, "delta": 1.3, "off_policy_mask_threshold": 0.05}, 0.4, "token", "", "token"),
}


def stub_trainer(trainer_class: Any, config: LossConfig, logps: Tensor) -> SimpleNamespace:
    """What `_compute_loss` asks of its trainer; the model's forward is replaced by its outcome."""
    accelerator = SimpleNamespace(
        num_processes=RANKS, gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True
    )
    args = SimpleNamespace(
        **vars(config),
        use_bias_correction_kl=config.kl_estimator == "k3_unbiased",
        steps_per_generation=STEPS_PER_GENERATION,
    )
    return SimpleNamespace(
        **{name: getattr(config, name) for name in ("loss_type", "importance_sampling_level", "beta")},
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        epsilon_low=config.epsilon,
        epsilon_high=config.upper,
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=ACCUMULATION,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.ones_like(logps), None),
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
    )


def trl_coefficients(config: LossConfig, micro: Micro) -> Tensor:
    """dLoss/dlogp through TRL's own loss."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logps = micro.logps.clone().requires_grad_()
    prompts = torch.zeros(len(logps), 1)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.zeros_like(logps),
        "completion_mask": micro.mask,
        "advantages": micro.advantages,
        "num_items_in_batch": torch.tensor(micro.tokens),
        "importance_sampling_ratio": torch.ones(len(logps), 1) if micro.weights is None else micro.weights,
        "ref_per_token_logps": micro.ref_logps,
    }
    if micro.old_logps is not None:
        inputs["old_per_token_logps"] = micro.old_logps
    loss = GRPOTrainer._compute_loss(stub_trainer(GRPOTrainer, config, logps), None, inputs)
    (gradient,) = torch.autograd.grad(loss, logps)
    return gradient


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_the_closed_form_is_the_gradient_of_trls_loss(loss: str, level: str, setting: str) -> None:
    config, micro = Setting({**EXACT, **SETTINGS[setting].loss}).config(loss, level), SETTINGS[setting].micro(5)
    arguments: dict[str, Any] = micro.arguments()
    if config.off_policy_mask_threshold is not None:
        assert micro.old_logps is not None
        arguments["keep"] = off_policy_keep(
            config,
            logps=micro.logps,
            sampling_logps=micro.old_logps,
            advantages=micro.advantages,
            mask=micro.mask,
        )
        assert 0 < int(arguments["keep"].sum()) < arguments["keep"].numel()
    found = coefficients(config, **arguments, normaliser=micro.normaliser(config))
    expected = trl_coefficients(config, micro)
    assert bool(expected.any())
    assert float((found - expected).abs().max()) <= COEFFICIENTS * float(expected.abs().max())


def test_settings_have_trls_names_and_defaults() -> None:
    from trl import GRPOConfig

    theirs = {field.name: field for field in fields(GRPOConfig)}
    for field in fields(LossConfig):
        if field.name in ("kl_estimator", "has_auxiliary_loss"):
            continue
        assert field.name in theirs
        if field.name != "max_completion_length":
            assert field.default is not MISSING
            assert field.default == theirs[field.name].default, field.name
    assert theirs["use_bias_correction_kl"].default is True
    assert LossConfig().kl_estimator == "k3_unbiased"


def test_weights_are_those_of_the_table() -> None:
    old, sampled = torch.tensor([[0.0, 2.0, -2.0, 9.0]]), torch.zeros(1, 4)
    sampled[0, 0] = float("nan")
    mask = torch.tensor([[1, 1, 1, 0]])
    e2 = float(torch.tensor(2.0).exp())
    expected = {
        "token_truncate": [1.0, 3.0, 0.5, 1.0],
        "token_mask": [1.0, 0.0, 0.0, 1.0],
        "sequence_truncate": [1.0],
        "sequence_mask": [1.0],
    }
    for mode, values in expected.items():
        config = LossConfig(
            vllm_importance_sampling_mode=mode,  # type: ignore[arg-type]
            vllm_importance_sampling_clip_max=3.0,
            vllm_importance_sampling_clip_min=0.5,
        )
        assert importance_weights(config, old_logps=old, sampling_logps=sampled, mask=mask).tolist() == [values]
    free = LossConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=None)
    weights = importance_weights(free, old_logps=old, sampling_logps=sampled, mask=mask)
    assert weights[0, 1].item() == pytest.approx(e2)
