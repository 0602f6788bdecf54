"""Closed forms against autograd through losses written out: every loss, level and setting, and the edges of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exposure.reference import SETTINGS, Micro, Setting, true_coefficients
from tolerances import COEFFICIENTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore_plan.errors import UsageError
from hilore_plan.exposure.coefficients import Batch, assemble, coefficients
from hilore_plan.exposure.losses import CLIPPED, LOSS_TYPES, LossConfig
from hilore_plan.exposure.normalisers import normaliser_for

LEVELS = ("token", "sequence")
SEEDS = range(4)


def closed(config: LossConfig, micro: Micro) -> Tensor:
    return coefficients(config, **micro.arguments(), normaliser=micro.normaliser(config))  # type: ignore[arg-type]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float64
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= COEFFICIENTS * float(expected.abs().max())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_the_closed_form_is_what_autograd_gives(loss: str, level: str, setting: str) -> None:
    config = SETTINGS[setting].config(loss, level)
    for seed in SEEDS:
        micro = SETTINGS[setting].micro(seed)
        found, expected = closed(config, micro), true_coefficients(config, micro)
        assert_equal(found, expected)
        assert bool((found[expected == 0] == 0).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_rows_of_one_token_and_columns_of_one(loss: str, level: str) -> None:
    setting = SETTINGS["everything"]
    for rows, tokens in ((2, 1), (2, 2), (5, 1)):
        micro = setting.micro(7, rows, tokens)
        assert_equal(closed(setting.config(loss, level), micro), true_coefficients(setting.config(loss, level), micro))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_a_micro_batch_without_counted_tokens_is_all_zero(loss: str, level: str) -> None:
    config = SETTINGS["off-policy"].config(loss, level)
    micro = SETTINGS["off-policy"].micro(0)
    micro = replace(micro, mask=torch.zeros_like(micro.mask))
    assert not closed(config, micro).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_groups_of_equal_rewards_are_exactly_zero_without_kl(loss: str, level: str) -> None:
    for setting in ("off-policy", "far", "token-weights"):
        found = closed(SETTINGS[setting].config(loss, level), SETTINGS[setting].micro(1))
        assert not found[-2:].any()
        assert found.any()


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["gain", "loss"])
@pytest.mark.parametrize("limit", ["high", "low", "delta"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", CLIPPED)
def test_exactly_at_a_limit_the_slope_is_torchs(loss: str, level: str, limit: str, sign: float) -> None:
    """The limits are made from a ratio that occurs: r - 1 and 1 + (r - 1) are exact for r between 0.5 and 2."""
    for seed in SEEDS:
        micro = replace(Setting({}).micro(seed), advantages=torch.full((7,), sign, dtype=torch.float64))
        assert micro.old_logps is not None
        log_ratio = micro.logps - micro.old_logps
        if level == "sequence":
            counts = micro.mask.sum(-1, keepdim=True).clamp(min=1)
            log_ratio = ((log_ratio * micro.mask).sum(-1, keepdim=True) / counts).expand_as(log_ratio)
        ratios = log_ratio.exp()[micro.mask.bool()]
        at = float(ratios[ratios < 1].max() if limit == "low" else ratios[ratios > 1].min())
        limits = {
            "high": {"epsilon_high": at - 1},
            "low": {"epsilon": 1 - at, "epsilon_high": 0.2},
            "delta": {"delta": at, "epsilon": 0.0},
        }[limit]
        config = Setting(limits).config(loss, level)
        assert {"high": 1 + config.upper, "low": 1 - config.epsilon, "delta": config.delta}[limit] in ratios.tolist()
        expected = true_coefficients(config, micro)
        assert_equal(closed(config, micro), expected)
        # a limit is still inside; but a gain is cut off by the clip, long before delta
        assert bool(expected[micro.mask.bool()][ratios == at].all()) == ((limit, sign) != ("delta", 1.0))


def test_a_tie_of_both_parts_halves_the_slope_as_torchs_minimum_does() -> None:
    """An advantage so small that the clipped and the free product round to the same number."""
    tiny = torch.finfo(torch.float64).tiny * torch.finfo(torch.float64).eps
    mask = torch.ones(1, 1)
    logps, old = torch.tensor([[0.3]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    micro = Micro(logps, old, None, torch.tensor([2 * tiny], dtype=torch.float64), mask)
    config = LossConfig("luspo", "token")
    expected = true_coefficients(config, micro)
    assert torch.equal(closed(config, micro), expected)


def test_gspo_spreads_one_slope_over_the_row() -> None:
    micro = SETTINGS["off-policy"].micro(2)
    found = closed(LossConfig("grpo", "sequence", epsilon=0.9), micro)
    for row, mask in zip(found, micro.mask.bool(), strict=True):
        assert len(set(row[mask].tolist())) <= 1
        assert not row[~mask].any()


def test_on_policy_every_ratio_loss_is_the_plain_policy_gradient() -> None:
    micro = SETTINGS["on-policy"].micro(3)
    for loss in (*CLIPPED, "sapo", "vespo"):
        config = SETTINGS["on-policy"].config(loss, "token")
        factors = micro.normaliser(config).factors(micro.mask.double())
        plain = -factors * micro.mask * micro.advantages[:, None]
        assert torch.equal(closed(config, micro), plain), loss
        assert torch.equal(closed(config, micro), closed(config, replace(micro, old_logps=micro.logps))), loss
        without = coefficients(
            config, logps=None, advantages=micro.advantages, mask=micro.mask, normaliser=micro.normaliser(config)
        )
        assert torch.equal(without, plain), loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_computed_in_fp32(dtype: torch.dtype) -> None:
    config = LossConfig("grpo")
    micro = SETTINGS["off-policy"].micro(0)
    narrow = {name: None if tensor is None else tensor.to(dtype) for name, tensor in micro.arguments().items()}
    found = coefficients(config, **narrow, normaliser=micro.normaliser(config))  # type: ignore[arg-type]
    wide = {name: None if tensor is None else tensor.float() for name, tensor in narrow.items()}
    assert found.dtype == torch.float32
    assert torch.equal(found, coefficients(config, **wide, normaliser=micro.normaliser(config)))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_everything_happens_on_the_inputs_device(loss: str, level: str) -> None:
    """On tensors that say they are on a GPU: mixing devices is an error there as well."""
    config = SETTINGS["everything"].config(loss, level)
    with FakeTensorMode():
        whole, rows = torch.empty(4, 5, device="cuda"), torch.empty(4, 1, device="cuda")
        batch = Batch(whole, rows, whole, whole, whole, rows, rows)
        for tokens in (10, torch.empty((), device="cuda", dtype=torch.long)):
            found = assemble(config, batch, normaliser_for(config, tokens=tokens))
            assert (found.device.type, found.shape) == ("cuda", (4, 5))


def test_inputs_keep_their_graph_to_themselves() -> None:
    micro = SETTINGS["off-policy"].micro(0)
    micro = replace(micro, logps=micro.logps.requires_grad_())
    assert not closed(LossConfig("grpo"), micro).requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["logps", "old_logps", "ref_logps", "advantages", "weights", "keep"])
def test_what_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    setting = SETTINGS["everything"]
    arguments = setting.micro(0).arguments()
    tensor = arguments[name]
    assert tensor is not None
    tensor[2, 3] = value
    config = setting.config("grpo", "token")
    with pytest.raises(UsageError, match=f"^{name} has 1 values that are not finite"):
        coefficients(config, **arguments, normaliser=setting.micro(0).normaliser(config))  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    micro = SETTINGS["everything"].micro(0)
    config = SETTINGS["everything"].config("grpo", "token")
    for name in ("logps", "old_logps", "ref_logps", "advantages", "weights"):
        tensor = micro.arguments()[name]
        assert tensor is not None
        with pytest.raises(UsageError, match=f"^{name} has the shape"):
            closed(config, replace(micro, **{name: tensor[:3]}))
    with pytest.raises(UsageError, match="mask has the shape"):
        closed(config, replace(micro, mask=micro.mask[0]))


def test_missing_log_probs_are_refused() -> None:
    micro = SETTINGS["kl-k3"].micro(0)
    config = SETTINGS["kl-k3"].config("grpo", "token")
    with pytest.raises(UsageError, match="needs logps and ref_logps"):
        closed(config, replace(micro, ref_logps=None))
    with pytest.raises(UsageError, match="old_logps are given without logps"):
        coefficients(
            LossConfig("grpo"),
            logps=None,
            old_logps=micro.old_logps,
            advantages=micro.advantages,
            mask=micro.mask,
            normaliser=micro.normaliser(config),
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_type": "ppo"},
        {"importance_sampling_level": "word"},
        {"kl_estimator": "k4"},
        {"epsilon": -0.1},
        {"beta": float("nan")},
        {"delta": -1.0},
        {"sapo_temperature_pos": 0.0},
        {"max_completion_length": 0},
    ],
    ids=str,
)
def test_settings_that_no_loss_has_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        LossConfig(**fields)  # type: ignore[arg-type]
