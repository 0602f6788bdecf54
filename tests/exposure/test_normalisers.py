"""Normalisers: regrouping rows of a step, and what is refused."""

from __future__ import annotations

import pytest
import torch
from exposure.reference import ACCUMULATION, SETTINGS
from tolerances import COEFFICIENTS

from hilore_plan.errors import UsageError
from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.losses import LOSS_TYPES, LossConfig
from hilore_plan.exposure.normalisers import KIND_OF_LOSS, Normaliser, normaliser_for


@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_rows_may_move_between_micro_batches_unless_the_kind_says_otherwise(loss: str) -> None:
    setting = SETTINGS["off-policy"]
    config, micro = setting.config(loss, "token"), setting.micro(0, rows=8)
    normaliser = normaliser_for(config, accumulation=ACCUMULATION, rows=8, tokens=micro.tokens)
    arguments = {name: tensor for name, tensor in micro.arguments().items() if tensor is not None}
    whole = coefficients(config, **arguments, normaliser=normaliser)  # type: ignore[arg-type]
    parts = [
        coefficients(
            config,
            **{name: tensor[rows] for name, tensor in arguments.items()},  # type: ignore[arg-type]
            normaliser=normaliser,
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]
    same = torch.allclose(whole, torch.cat(parts), rtol=COEFFICIENTS, atol=0)
    assert same == normaliser.ignores_grouping == (loss != "bnpo")


def test_steps_per_generation_default_to_the_accumulation() -> None:
    mask = torch.ones(2, 3)
    config = LossConfig("dapo")
    plain = normaliser_for(config, accumulation=4, tokens=60).factors(mask)
    given = normaliser_for(config, accumulation=4, tokens=torch.tensor(60), steps_per_generation=4).factors(mask)
    assert torch.equal(plain, given)
    assert plain.tolist() == [[pytest.approx(1 / 60)]] * 2


def test_no_tokens_divide_by_one_and_no_rows_by_none() -> None:
    for loss in LOSS_TYPES:
        config = LossConfig(loss, max_completion_length=1)
        factors = normaliser_for(config, tokens=0).factors(torch.zeros(2, 3))
        assert factors.shape == (2, 1)
        assert bool(factors.isfinite().all())
        assert normaliser_for(config, tokens=0).factors(torch.zeros(0, 3)).shape == (0, 1)


def test_every_loss_has_a_kind() -> None:
    assert set(KIND_OF_LOSS) == set(LOSS_TYPES)


def test_counts_that_are_missing_or_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="divides by tokens"):
        normaliser_for(LossConfig("dapo"))
    with pytest.raises(UsageError, match="divides by max_completion_length"):
        normaliser_for(LossConfig("dr_grpo"))
    for field in ("accumulation", "rows", "ranks", "steps_per_generation", "max_completion_length"):
        with pytest.raises(UsageError, match="below 1"):
            Normaliser("row_mean", **{field: 0})
