"""Zeros: their causes, and when they mean that there is no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exposure.reference import SETTINGS, Setting

from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.losses import LOSS_TYPES, LossConfig
from hilore_plan.exposure.zeros import may_skip, signal_free_rows, why_zero


def tensors(setting: Setting, seed: int = 0) -> dict[str, Any]:
    arguments = setting.micro(seed).arguments()
    del arguments["ref_logps"]
    return arguments


@pytest.mark.parametrize("setting", ["on-policy", "off-policy", "far", "delta-outside", "token-weights", "row-keep"])
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_each_zero_has_one_cause_and_nothing_else_has(loss: str, setting: str) -> None:
    config = SETTINGS[setting].config(loss, "token")
    found = coefficients(config, **tensors(SETTINGS[setting]), normaliser=SETTINGS[setting].micro(0).normaliser(config))
    causes = torch.stack(list(why_zero(config, **tensors(SETTINGS[setting]))))
    assert torch.equal(causes.sum(0), (found == 0).long())


def test_the_causes_are_named_in_order() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    zeros = why_zero(
        LossConfig("dapo", epsilon=0.2),
        logps=torch.tensor([[0.0, 1.0, -1.0, 0.0, 1.0]]),
        old_logps=torch.zeros(1, 5),
        advantages=torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]]),
        weights=torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]]),
        mask=mask,
    )
    assert zeros.counts() == {"mask": 1, "advantage": 1, "weight": 1, "flat": 1}
    assert zeros.flat.tolist() == [[False, True, False, False, False]]
    assert zeros.weight.tolist() == [[False, False, False, True, False]]


@pytest.mark.parametrize("loss", ["cispo", "sapo"])
def test_these_losses_never_clip_a_token_away(loss: str) -> None:
    for seed in range(4):
        zeros = why_zero(SETTINGS["off-policy"].config(loss, "token"), **tensors(SETTINGS["off-policy"], seed))
        assert zeros.counts()["flat"] == 0


def test_a_row_under_gspo_is_clipped_at_once() -> None:
    setting = SETTINGS["far"]
    flat = why_zero(setting.config("grpo", "sequence"), **tensors(setting)).flat
    counted = setting.micro(0).mask.bool()
    assert bool(flat.any())
    assert all(len(set(row[mask].tolist())) <= 1 for row, mask in zip(flat, counted, strict=True))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"beta": 0.01}, "KL"),
        ({"entropy_coef": 0.001}, "entropy"),
        ({"use_adaptive_entropy": True}, "entropy"),
        ({"has_auxiliary_loss": True}, "auxiliary"),
    ],
)
def test_other_terms_of_the_loss_forbid_skipping_and_say_why(fields: dict[str, Any], word: str) -> None:
    config = LossConfig(**fields)
    allowed, reason = may_skip(config)
    assert not allowed
    assert word in reason
    assert not signal_free_rows(config, torch.zeros(3, 4)).any()


def test_rows_without_signal_are_found_where_the_loss_allows_it() -> None:
    assert may_skip(LossConfig()).allowed
    found = torch.tensor([[0.0, 0.0], [0.0, -1e-38], [-0.0, 0.0]])
    assert signal_free_rows(LossConfig(), found).tolist() == [True, False, True]
