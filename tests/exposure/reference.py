"""The losses written out as losses, in fp64, for autograd to differentiate; and seeded micro-batches for them.

Nothing here is shared with the closed forms but the names of the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import Normaliser, normaliser_for

ACCUMULATION, RANKS, STEPS_PER_GENERATION, LONGEST = 4, 2, 8, 11


@dataclass(frozen=True)
class Micro:
    """One micro-batch, as `coefficients` takes it."""

    logps: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
    keep: Tensor | None = None

    @property
    def tokens(self) -> int:
        """N, as a generation of five such micro-batches would have it."""
        return 5 * int(self.mask.sum())

    def arguments(self) -> dict[str, Tensor | None]:
        return dict(vars(self))

    def normaliser(self, config: LossConfig) -> Normaliser:
        return normaliser_for(
            config,
            accumulation=ACCUMULATION,
            tokens=self.tokens,
            ranks=RANKS,
            steps_per_generation=STEPS_PER_GENERATION,
        )


@dataclass(frozen=True)
class Setting:
    """A row of the table of configurations: settings of the loss, and which tensors there are."""

    loss: Mapping[str, object]
    drift: float | None = 0.2  # of the log-probs since they were sampled; None: on-policy
    weights: str = ""  # "", "token" or "row"
    keep: str = ""
    advantages: str = "row"

    def config(self, loss_type: str, level: str) -> LossConfig:
        fields = {"max_completion_length": LONGEST, "importance_sampling_level": level, **self.loss}
        return LossConfig(loss_type=loss_type, **fields)  # type: ignore[arg-type]

    def micro(self, seed: int, rows: int = 7, tokens: int = 9) -> Micro:
        """Rows of all lengths from 0 to `tokens`, one of a single token, and a group of equal rewards."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        shapes = {"row": (rows, 1), "token": (rows, tokens)}
        lengths = torch.tensor([0, 1, *torch.randint(0, tokens + 1, (rows - 2,), generator=generator).tolist()])
        logps = -normal(rows, tokens).exp()
        advantages = normal(*shapes[self.advantages])
        advantages[-2:] = 0
        return Micro(
            logps=logps,
            old_logps=None if self.drift is None else logps - self.drift * normal(rows, tokens),
            ref_logps=logps + 0.3 * normal(rows, tokens) if self.loss.get("beta") else None,
            advantages=advantages.squeeze(1) if self.advantages == "row" else advantages,
            mask=(torch.arange(tokens) < lengths[:, None]).long(),
            weights=_truncated(normal(*shapes[self.weights])) if self.weights else None,
            keep=(normal(*shapes[self.keep]) > -0.5).to(torch.float32) if self.keep else None,
        )


def _truncated(normal: Tensor) -> Tensor:
    """Importance weights as a sampler's correction gives them: some cut at 2, some dropped."""
    weights = (0.5 * normal).exp().clamp(max=2.0)
    return weights.masked_fill(normal < -1.2, 0.0)


SETTINGS: dict[str, Setting] = {
    "on-policy": Setting({}, drift=None),
    "near": Setting({}, drift=0.01),
    "off-policy": Setting({}),
    "far": Setting({}, drift=1.5),
    "uneven-clip": Setting({"epsilon": 0.1, "epsilon_high": 0.28}),
    "cap-above-1": Setting({"epsilon_high": 3.0}, drift=1.5),
    "delta-outside": Setting({"delta": 1.5}, drift=0.6),
    "delta-inside": Setting({"delta": 1.05}, drift=0.3),
    "delta-below-1": Setting({"delta": 0.9}, drift=0.3),
    "temperatures": Setting({"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5}, drift=1.0),
    "vespo-shapes": Setting({"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 0.0}),
    "token-weights": Setting({}, weights="token"),
    "row-weights": Setting({}, weights="row"),
    "token-keep": Setting({}, keep="token"),
    "row-keep": Setting({}, keep="row"),
    "token-advantages": Setting({}, advantages="token"),
    **{f"kl-{kl}": Setting({"beta": 0.04, "kl_estimator": kl}) for kl in ("k1", "k2", "k3", "k3_unbiased")},
    "kl-on-policy": Setting({"beta": 0.04}, drift=None),
    "everything": Setting(
        {"beta": 0.1, "epsilon": 0.15, "epsilon_high": 0.3, "delta": 1.4}, 0.4, "token", "token", "token"
    ),
}


def true_coefficients(config: LossConfig, micro: Micro) -> Tensor:
    """dLoss/dlogp by autograd."""
    logps = micro.logps.clone().requires_grad_()
    loss = reference_loss(config, replace(micro, logps=logps))
    (gradient,) = torch.autograd.grad(loss, logps)
    return gradient


def reference_loss(config: LossConfig, micro: Micro) -> Tensor:
    """The loss of one micro-batch, with its normaliser."""
    old = micro.logps.detach() if micro.old_logps is None else micro.old_logps
    advantages = micro.advantages[:, None] if micro.advantages.dim() == 1 else micro.advantages
    log_ratio = micro.logps - old
    counts = micro.mask.sum(1, keepdim=True).clamp(min=1)
    shared = (log_ratio * micro.mask).sum(1, keepdim=True) / counts
    ratio = torch.exp(log_ratio if config.importance_sampling_level == "token" else shared.expand_as(log_ratio))
    weights = torch.ones(()) if micro.weights is None else micro.weights
    if config.loss_type == "vespo":
        loss = _vespo(config, micro, log_ratio, advantages)
    else:
        loss = POLICY[config.loss_type](config, ratio, advantages, micro.logps) * weights
    if micro.keep is not None:
        loss = loss * micro.keep
    if config.beta:
        loss = loss + config.beta * _kl(config, micro, ratio)
    per_row = (loss * micro.mask).sum(1)
    return _normalised(config, micro, per_row, counts.squeeze(1))


def _ppo(config: LossConfig, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    limited = ratio if config.delta is None else torch.clamp(ratio, max=config.delta)
    clipped = torch.clamp(ratio, 1 - config.epsilon, 1 + high)
    return -torch.min(limited * advantages, clipped * advantages)


def _cispo(config: LossConfig, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    cap = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return -torch.clamp(ratio, max=cap).detach() * advantages * logps


def _sapo(config: LossConfig, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    def gate(tau: float) -> Tensor:
        return 4 / tau * torch.sigmoid(tau * (ratio - 1))

    return -advantages * torch.where(
        advantages > 0, gate(config.sapo_temperature_pos), gate(config.sapo_temperature_neg)
    )


def _vespo(config: LossConfig, micro: Micro, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    with torch.no_grad():
        log_w = (log_ratio.clamp(-20, 20) * micro.mask).sum(1, keepdim=True)
        if micro.weights is not None:
            log_w = log_w + torch.log(micro.weights).clamp(math.log(1e-8), 20).sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20)

        def gamma(k: float, lam: float) -> Tensor:
            lam = max(lam, 1e-4)
            return torch.exp(lam + k * log_w - lam * torch.exp(log_w))

        gain, loss = (
            gamma(config.vespo_k_pos, config.vespo_lambda_pos),
            gamma(config.vespo_k_neg, config.vespo_lambda_neg),
        )
        phi = torch.where(advantages >= 0, gain, loss)
    return -phi * advantages * micro.logps


POLICY: dict[str, Callable[[LossConfig, Tensor, Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo", "luspo"), _ppo),
    "cispo": _cispo,
    "sapo": _sapo,
}


def _kl(config: LossConfig, micro: Micro, ratio: Tensor) -> Tensor:
    assert micro.ref_logps is not None
    distance = micro.logps - micro.ref_logps
    k3 = torch.exp(-distance) + distance - 1
    return {"k1": distance, "k2": distance**2 / 2, "k3": k3, "k3_unbiased": k3 * ratio}[config.kl_estimator]


def _normalised(config: LossConfig, micro: Micro, per_row: Tensor, counts: Tensor) -> Tensor:
    if config.loss_type in ("grpo", "sapo"):
        return (per_row / counts).mean() / ACCUMULATION
    if config.loss_type == "luspo":
        return per_row.mean() / ACCUMULATION
    if config.loss_type == "bnpo":
        return per_row.sum() / micro.mask.sum().clamp(min=1) / ACCUMULATION
    if config.loss_type == "dr_grpo":
        return per_row.sum() / (len(per_row) * LONGEST) / ACCUMULATION
    window = max(micro.tokens, 1) / RANKS * ACCUMULATION / STEPS_PER_GENERATION
    return per_row.sum() / window
