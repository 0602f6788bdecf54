"""The peak of one actor update: all bytes on the device, as `max_memory_allocated` counts them."""

from __future__ import annotations

import gc
import os

import torch

from hilore_plan.profiler.memory import Recorder
from hilore_plan.profiler.step import ActorStep, Enterable
from hilore_plan.schema.record import GradientState


def quiet_profiler() -> None:
    """Stops torch's profiler library from printing a line per recording (torch 2.13, `USDT:` on stderr)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def start_bytes(step: ActorStep, gradients: GradientState) -> int:
    """What is live before a micro-batch that begins with these gradients; afterwards it may begin."""
    step.begin(gradients)
    gc.collect()
    return torch.cuda.memory_allocated(step.device) if step.device.type == "cuda" else step.live_bytes()


def measure_peak(step: ActorStep, runtime: Enterable | None = None, *, last: GradientState | None = None) -> int:
    """Peak bytes of one update; the optimizer's state must be there already, so step once before.

    Args:
        step: the update.
        runtime: that it runs under.
        last: only its last micro-batch and what follows it, begun with these gradients.
    """
    quiet_profiler()
    base = start_bytes(step, last or "none")
    with Recorder(step.device) as recorder:
        if last is None:
            step.step(runtime)
        else:
            step.short(runtime)
    return base + recorder.trace.peak_bytes
