"""Predictions before forward: when they are exact, and what they rest on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exposure.reference import SETTINGS, Micro, Setting, true_coefficients
from tolerances import COEFFICIENTS

from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.losses import LOSS_TYPES, LossConfig
from hilore_plan.exposure.predict import Prediction, predict


def predicted(config: LossConfig, micro: Micro, **more: Any) -> Prediction:
    arguments = micro.arguments()
    del arguments["logps"]
    return predict(config, **arguments, normaliser=micro.normaliser(config), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["on-policy", "token-weights"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_on_policy_the_prediction_is_exact(loss: str, level: str, setting: str) -> None:
    micro = replace(SETTINGS[setting].micro(0), old_logps=None)
    config = SETTINGS[setting].config(loss, level)
    found = predicted(config, micro)
    assert found.exact
    assert "on-policy" in found.basis
    expected = true_coefficients(config, micro)
    assert float((found.coefficients - expected).abs().max()) <= COEFFICIENTS * float(expected.abs().max())


@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_off_policy_the_newest_log_probs_stand_in(loss: str) -> None:
    micro, config = SETTINGS["off-policy"].micro(0), SETTINGS["off-policy"].config(loss, "token")
    from_old, from_last = predicted(config, micro), predicted(config, micro, last_logps=micro.logps)
    assert not from_old.exact
    assert "taken as 1" in from_old.basis
    assert torch.equal(from_old.coefficients, predicted(config, replace(micro, old_logps=None)).coefficients)
    assert not from_last.exact
    assert "last log-probs" in from_last.basis
    true = coefficients(config, **micro.arguments(), normaliser=micro.normaliser(config))  # type: ignore[arg-type]
    assert torch.equal(from_last.coefficients, true)


def test_a_kl_term_is_predicted_from_what_is_there_or_left_out() -> None:
    setting = SETTINGS["kl-k2"]
    micro, config = setting.micro(0), setting.config("grpo", "token")
    from_old = predicted(config, micro)
    assert "KL term is that of the newest" in from_old.basis
    assert torch.equal(
        from_old.coefficients,
        coefficients(
            config,
            **{**micro.arguments(), "logps": micro.old_logps},  # type: ignore[arg-type]
            normaliser=micro.normaliser(config),
        ),
    )
    unknown = predicted(config, replace(micro, old_logps=None))
    assert not unknown.exact
    assert "left out" in unknown.basis
    without = predicted(replace(config, beta=0.0), replace(micro, old_logps=None, ref_logps=None))
    assert torch.equal(unknown.coefficients, without.coefficients)


@pytest.mark.parametrize(
    ("fields", "word"), [({"top_entropy_quantile": 0.2}, "entropy"), ({"off_policy_mask_threshold": 0.1}, "off-policy")]
)
def test_what_forward_decides_makes_it_inexact(fields: dict[str, Any], word: str) -> None:
    setting = Setting(fields, drift=None)
    found = predicted(setting.config("dapo", "token"), setting.micro(0))
    assert not found.exact
    assert word in found.basis
