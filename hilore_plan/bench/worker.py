"""One mode of a comparison in a process of its own: `python -m hilore_plan.bench.worker`, driven through pipes.

Requests come as JSON lines on standard input, answers go as JSON lines to what was standard output when the process
began; whatever libraries print goes to standard error instead.

| request `do` | answer |
| --- | --- |
| `build` (`mode`, `workload`, `device`, `seed`, `plan`) | `exposures` of the micro-batches |
| `save_gradient` (`path`) | nothing; the gradient of the first micro-batch at the initial weights |
| `compare_gradient` (`path`) | `gradient_error` |
| `warm` | nothing; one step |
| `peak` | `peak_bytes` of a step |
| `entry_peak` (`gradients`, `exposure`) | `peak_bytes` of a micro-batch that begins so, and the optimizer's step |
| `step` | `seconds` |
| `replan` (`plan`, `workload`) | nothing |
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from hilore_plan.bench.modes import mode
from hilore_plan.bench.workload import Built, build_workload, resized
from hilore_plan.errors import HiloreError, ProcessError
from hilore_plan.profiler.clock import seconds_of
from hilore_plan.profiler.peaks import measure_peak, quiet_profiler
from hilore_plan.profiler.repeatable import repeatable
from hilore_plan.profiler.step import Enterable
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.record import GradientState, Workload

Answer = dict[str, Any]


@dataclass(frozen=True)
class InBucket:
    """A runtime whose micro-batches all have one exposure."""

    runtime: Enterable
    exposure: float | None

    def microbatch(self, *, tokens: int | None = None, exposure: float | None = None) -> AbstractContextManager[object]:
        """See `Enterable`."""
        del exposure
        return self.runtime.microbatch(tokens=tokens, exposure=self.exposure)


class Worker:
    """The mode's model, and what puts the mode on it."""

    def __init__(self) -> None:
        self._built: Built | None = None
        self._mode = ""
        self._stack = ExitStack()
        self._runtime: Enterable | None = None
        self._requests: dict[str, Callable[..., Answer]] = {
            "build": self.build,
            "save_gradient": self.save_gradient,
            "compare_gradient": self.compare_gradient,
            "warm": self.warm,
            "peak": self.peak,
            "entry_peak": self.entry_peak,
            "step": self.step,
            "replan": self.replan,
        }

    def answer(self, request: dict[str, Any]) -> Answer:
        """Does what one request asks for."""
        arguments = {key: value for key, value in request.items() if key != "do"}
        return self._requests[request["do"]](**arguments)

    def build(self, mode: str, workload: dict[str, Any], device: str, seed: int, plan: str | None) -> Answer:
        """Builds the model and puts the mode on it."""
        self._mode = mode
        self._built = build_workload(Workload.model_validate(workload), device, seed)
        self._enter(plan)
        return {"exposures": self._built.step.exposures}

    def replan(self, plan: str, workload: dict[str, Any]) -> Answer:
        """Takes the plan off, puts another one on, and changes the size of the update."""
        self._stack.close()
        self._built = resized(self.built, Workload.model_validate(workload))
        self._enter(plan)
        return {}

    def _enter(self, plan: str | None) -> None:
        loaded = None if plan is None else load_plan(plan)
        self._stack = ExitStack()
        self._runtime = self._stack.enter_context(mode(self._mode, self.built.model, loaded))

    @property
    def built(self) -> Built:
        """The model and its update, once built."""
        if self._built is None:
            raise RuntimeError("the worker was asked before it was told what to build")
        return self._built

    def save_gradient(self, path: str) -> Answer:
        """Writes the gradient of the first micro-batch."""
        torch.save(self._gradient(), path)
        self._forget()
        return {}

    def compare_gradient(self, path: str) -> Answer:
        """The relative distance of this mode's gradient from the saved one."""
        mine = self._gradient()
        theirs = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        error = gradient_error(mine, theirs)
        del mine, theirs
        self._forget()
        return {"gradient_error": error}

    def _gradient(self) -> dict[str, torch.Tensor]:
        with repeatable(self.built.step.device):
            self.built.step.backward(0, self._runtime)
        named = self.built.model.named_parameters()
        return {name: p.grad.detach().cpu() for name, p in named if p.grad is not None}

    def _forget(self) -> None:
        self.built.step.optimizer.zero_grad(set_to_none=True)

    def warm(self) -> Answer:
        """One step that is not measured."""
        self.built.step.step(self._runtime)
        return {}

    def peak(self) -> Answer:
        """The peak of one step."""
        return {"peak_bytes": measure_peak(self.built.step, self._runtime)}

    def entry_peak(self, gradients: GradientState, exposure: float | None) -> Answer:
        """The peak under one entry of the plan; without an exposure it is that of the highest bucket."""
        runtime = None if self._runtime is None else InBucket(self._runtime, exposure)
        return {"peak_bytes": measure_peak(self.built.step, runtime, last=gradients)}

    def step(self) -> Answer:
        """The seconds of one step."""
        step = self.built.step
        return {"seconds": seconds_of(lambda: step.step(self._runtime), step.device)}


def gradient_error(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """`|mine - theirs| / |theirs|` over all parameters, in float64; exactly 0.0 where all are bit-equal."""
    if mine.keys() != theirs.keys():
        return float("inf")
    if all(torch.equal(mine[name], theirs[name]) for name in theirs):
        return 0.0
    difference = reference = 0.0
    for name, expected in theirs.items():
        wide = expected.double()
        reference += float(wide.square().sum())
        difference += float((mine[name].double() - wide).square().sum())
    if difference == 0.0:
        # unequal, yet without a difference: a NaN on one side or zeros of different signs
        return float(torch.finfo(torch.float64).tiny)
    error = (difference / reference) ** 0.5 if reference else float("inf")
    return float("inf") if math.isnan(error) else error


def _failed(error: HiloreError) -> Answer:
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers each request until there are no more; a user's error is an answer, any other ends the process."""
    worker = Worker()
    for line in requests:
        try:
            answer = worker.answer(json.loads(line))
        except HiloreError as error:
            answer = _failed(error)
        except torch.OutOfMemoryError:
            hint = "compare fewer modes at once with --against"
            answer = _failed(ProcessError("the device has no memory left", hint))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves on the standard streams."""
    # Ctrl-C reaches the whole group: the parent handles it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet_profiler()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
