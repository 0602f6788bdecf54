"""The peak of one actor update: all bytes on the device, as `max_memory_allocated` counts them."""

from __future__ import annotations

import gc
import os

import torch

from hilore_plan.profiler.memory import Recorder
from hilore_plan.profiler.step import ActorStep, Enterable


def quiet_profiler() -> None:
    """Stops torch's profiler library from printing a line per recording (torch 2.13, `USDT:` on stderr)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def start_bytes(step: ActorStep) -> int:
    """What is live before an update whose gradients are zeroed or freed."""
    step.zero_grad()
    gc.collect()
    return torch.cuda.memory_allocated(step.device) if step.device.type == "cuda" else step.live_bytes()


def measure_peak(step: ActorStep, runtime: Enterable | None = None, *, short: bool = False) -> int:
    """Peak bytes of one update; the optimizer's state must be there already, so step once before.

    Args:
        step: the update.
        runtime: that it runs under.
        short: take the first micro-batch for all of them.
    """
    quiet_profiler()
    base = start_bytes(step)
    with Recorder(step.device) as recorder:
        if short:
            step.short(runtime)
        else:
            step.step(runtime)
    return base + recorder.trace.peak_bytes
