"""A model under exact and compressed plans, on a GPU or a CPU: what `gpu_check.py` runs of each way to train.

The errors, peaks and times are judged by the constants below, none of which was measured on a GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hilore_plan.bench.modes import PLAN, mode
from hilore_plan.bench.pairs import run_bench
from hilore_plan.bench.prediction import predicted_step
from hilore_plan.bench.worker import gradient_error
from hilore_plan.bench.workload import Built, build_workload
from hilore_plan.cli import rows, ui
from hilore_plan.integrations.profile_source import profile_model
from hilore_plan.planner.baselines import baseline
from hilore_plan.planner.plan import solve_plan
from hilore_plan.profiler.peaks import measure_peak
from hilore_plan.profiler.repeatable import repeatable
from hilore_plan.quantities import format_bytes, format_seconds
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Profile

PEAK_SHARE = 0.05
# what the caching allocator may hold beyond the bytes in use: pieces of blocks that nothing fits into
RESERVED_SHARE = 0.25
# a single micro-batch errs more than the step of several that an error is predicted for
ERROR_FACTOR = 3.0
# so much memory holds five processes with the model and its optimizer, one of which stores everything
ROOMY_BYTES = 120 * 2**30

SHAPE: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Line:
    """One thing that was found; `passed` is None for what is only told."""

    text: str
    passed: bool | None = None

    def __str__(self) -> str:
        return f"  {({True: 'met', False: 'NOT MET', None: ''})[self.passed]:8}{self.text}"


@dataclass(frozen=True)
class Check:
    """A check by name, what it may take on a GPU, and its lines."""

    name: str
    seconds: float
    lines: Callable[[], Iterator[Line]]


@dataclass(frozen=True)
class Sizes:
    """What is run where."""

    device: str
    source: str
    dtype: str
    batch: int
    prompt_tokens: int
    response_tokens: int
    pairs: int
    budget: str


GPU = Sizes("cuda", "gpu_plans:qwen2_1_5b", "bfloat16", 4, 512, 2048, 3, "1.1x-gc")
# a model as tiny as this one is mostly head and rounding: within 1.1 times checkpointing's peak there is no plan
CPU = Sizes("cpu", "gpu_plans:qwen2_tiny", "float32", 2, 16, 48, 1, "1.3x-gc")


def qwen2_1_5b() -> nn.Module:
    """A model of the shape of Qwen2.5-1.5B; processes find it by `GPU.source`."""
    return _random(SHAPE, torch.bfloat16, "cuda")


def qwen2_tiny() -> nn.Module:
    """The tiny one."""
    return _random(TINY, torch.float32, "cpu")


def _random(shape: dict[str, Any], dtype: torch.dtype, device: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen2", **shape)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model


class Setup:
    """One way to train the model: its profile and plans are made by the first check and used by the others."""

    def __init__(self, name: str, lora_rank: int, sizes: Sizes) -> None:
        self.name = name
        self.lora_rank = lora_rank
        self.sizes = sizes
        self.device = torch.device(sizes.device)
        self.profile: Profile | None = None
        self.plans: dict[str, Plan] = {}

    def checks(self) -> list[Check]:
        """In the order in which they need each other."""
        return [
            Check(f"{self.name}: profile and plans", 60, self.measure),
            Check(f"{self.name}: gradients and peaks", 45, self.verify),
        ]

    def comparison(self) -> Check:
        """The longest one."""
        return Check(f"{self.name}: hilore bench", 100, self.compare)

    def measure(self) -> Iterator[Line]:
        """Measure, calibrate for int8, and solve."""
        sizes, started = self.sizes, time.monotonic()
        profile = profile_model(
            sizes.source,
            batch=sizes.batch,
            prompt_tokens=sizes.prompt_tokens,
            response_tokens=sizes.response_tokens,
            dtype=sizes.dtype,
            device=sizes.device,
            lora_rank=self.lora_rank,
            token_points=1,
            codecs=("int8",),
            calibration_microbatches=4,
        )
        point = profile.points[-1]
        yield Line(
            f"{profile.model.name}, {profile.model.parameters / 1e9:.2f} G parameters, {point.tokens} tokens: storing "
            f"everything takes {format_bytes(point.store.peak_bytes)} and {format_seconds(point.store.step_seconds)}, "
            f"checkpointing {format_bytes(point.gc.peak_bytes)} and {format_seconds(point.gc.step_seconds)}"
        )
        yield Line("every block is captured", all(kind.uncaptured is None for kind in profile.classes))
        mixed = solve_plan(profile, budget=sizes.budget)
        self.plans = {
            "exact": solve_plan(profile, budget=sizes.budget, risk="0"),
            "mixed": mixed,
            "compress-int8": baseline("compress-int8", mixed, profile),
        }
        self.profile = profile
        yield Line(f"profiled and planned in {format_seconds(time.monotonic() - started)}")

    def verify(self) -> Iterator[Line]:
        """The plans in this process: gradients first, as peaks need steps that change the weights."""
        if self.profile is None:
            yield Line("left out: there is no profile")
            return
        built = build_workload(self.profile.workload, self.sizes.device)
        yield from self._gradients(built)
        yield from self._peaks(built, self.profile)

    def _gradients(self, built: Built) -> Iterator[Line]:
        reference = gradient(built, None)
        yield Line(
            "without a plan, a gradient is the same twice", gradient_error(gradient(built, None), reference) == 0
        )
        for name, plan in self.plans.items():
            with mode(PLAN, built.model, plan) as runtime:
                error = gradient_error(gradient(built, runtime), reference)
                trouble = runtime.report().fallbacks | runtime.report().stored_instead  # type: ignore[union-attr]
            yield Line(f"{name}: no block falls back{': ' if trouble else ''}{_first(trouble)}", not trouble)
            if name == "exact":
                yield Line(
                    f"exact: the gradient is that of storing everything, bit for bit (error {error:g})", error == 0
                )
                continue
            allowed = ERROR_FACTOR * (plan.entries[-1].predicted.error + self._noise)
            yield Line(f"{name}: gradient error {error:.4f}, at most {allowed:.4f} expected", error <= allowed)

    @property
    def _noise(self) -> float:
        """What the dtype itself adds to a gradient: any change at all brings about so much."""
        return (self.profile.risk.noise if self.profile and self.profile.risk else None) or 0.0

    def _peaks(self, built: Built, profile: Profile) -> Iterator[Line]:
        built.step.step()
        point = profile.points[-1]
        predicted = {name: predicted_step(plan, built.step.exposures).peak_bytes for name, plan in self.plans.items()}
        predicted = {"store": point.store.peak_bytes, "gc": point.gc.peak_bytes, **predicted}
        for name, expected in predicted.items():
            with mode(PLAN if name in self.plans else name, built.model, self.plans.get(name)) as runtime:
                built.step.step(runtime)
                release()
                allocated = measure_peak(built.step, runtime)
            off = allocated / expected - 1
            text = f"{name}: peak {format_bytes(allocated)}, predicted {format_bytes(expected)} ({off:+.1%})"
            yield Line(text, abs(off) <= PEAK_SHARE)
            if self.device.type == "cuda":  # nothing has been given back since the cache was emptied
                reserved = torch.cuda.memory_reserved(self.device)
                text = f"{name}: {format_bytes(reserved)} reserved ({reserved / expected - 1:+.1%})"
                yield Line(text, reserved <= expected * (1 + RESERVED_SHARE))

    def compare(self) -> Iterator[Line]:
        """The plan beside the others, each in its own process; what the device cannot hold at once is left out."""
        if self.profile is None:
            yield Line("left out: there is no profile")
            return
        release()
        roomy = self.device.type == "cpu" or torch.cuda.get_device_properties(0).total_memory >= ROOMY_BYTES
        against = ["exact-plan", "gc", *(["store", "sac-attention"] if roomy else [])]
        plan = self.plans["mixed"]
        bench = run_bench(plan, against=against, pairs=self.sizes.pairs, profile=self.profile)
        ui.show_tables([rows.bench_modes(bench)])
        found = {each.name: each for each in bench.modes}
        yield Line(f"exact-plan: gradient error {found['exact-plan'].gradient_error}", True)


def gradient(built: Built, runtime: Any) -> dict[str, torch.Tensor]:
    """The gradient of the first micro-batch, by kernels that give the same bits every time."""
    with repeatable(built.step.device):
        built.step.backward(0, runtime)
    found = {name: p.grad for name, p in built.model.named_parameters() if p.grad is not None}
    built.step.optimizer.zero_grad(set_to_none=True)
    return found


def release() -> None:
    """Give back to the device what nothing uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first(trouble: dict[str, Any]) -> str:
    return next((f"{name}: {reason}" for name, reason in trouble.items()), "")
