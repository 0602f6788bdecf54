"""A worker process from the parent's side: requests go in, answers come out, errors are raised here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hilore_plan import errors
from hilore_plan.profiler.malloc import malloc_environment
from hilore_plan.profiler.repeatable import repeatable_environment
from hilore_plan.schema.record import GradientState, Workload


class ModeProcess:
    """Context manager around one worker that runs one mode.

    Args:
        mode: the mode's name.
        workload: what the worker builds; its source has to be one that another process can build too.
        device: where.
        plan: path of a plan, for the mode `plan`.
    """

    def __init__(self, mode: str, workload: Workload, device: str, *, plan: Path | None = None, seed: int = 0) -> None:
        self.mode = mode
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hilore_plan.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=_environment(),
        )
        try:
            answer = self._ask(
                "build", mode=mode, workload=workload.model_dump(), device=device, seed=seed, plan=_text(plan)
            )
            self.exposures: list[float] = answer["exposures"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ModeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process: it holds a model, and nothing that would have to be saved."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # what a process that died has not read is written once more here
                    stream.close()

    def save_gradient(self, path: Path) -> None:
        """Writes the gradient of the first micro-batch at the initial weights."""
        self._ask("save_gradient", path=str(path))

    def gradient_error(self, path: Path) -> float:
        """How far this mode's gradient is from the saved one, relative to it."""
        return float(self._ask("compare_gradient", path=str(path))["gradient_error"])

    def warm(self) -> None:
        """One step that is not measured."""
        self._ask("warm")

    def peak_bytes(self) -> int:
        """The peak of one step."""
        return int(self._ask("peak")["peak_bytes"])

    def entry_peak_bytes(self, gradients: GradientState, exposure_up_to: float | None) -> int:
        """The peak of one micro-batch that an entry is for, and of the optimizer's step after it."""
        return int(self._ask("entry_peak", gradients=gradients, exposure=exposure_up_to)["peak_bytes"])

    def step_seconds(self) -> float:
        """The seconds of one step."""
        return float(self._ask("step")["seconds"])

    def replan(self, plan: Path, workload: Workload) -> None:
        """Another plan on the same model, and another size of the update."""
        self._ask("replan", plan=str(plan), workload=workload.model_dump())

    def _ask(self, what: str, **arguments: object) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("a worker without pipes")
        with suppress(BrokenPipeError):  # a process that died answers with nothing, and that is said below
            stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise _ended(self.mode, what, self._process.wait())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["error"], errors.HiloreError)
            raise kind(answer["message"], answer["hint"])
        return answer


def _ended(mode: str, what: str, code: int) -> errors.ProcessError:
    if code == -signal.SIGKILL:
        how, hint = "was killed", "memory may have run out: compare fewer modes at once with --against"
    else:
        how, hint = f"ended with code {code}", "its own message stands above"
    return errors.ProcessError(f"the process of mode {mode!r} {how} when it was asked to {what!r}", hint)


def _environment() -> dict[str, str]:
    """The parent's environment, what gradients need to be compared, the allocator's settings, and the import path."""
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return {**repeatable_environment(), **os.environ, **malloc_environment(), "PYTHONPATH": paths}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
