"""What can be checked of hilore on a GPU in eight minutes: kernels, exactness, peaks, and times beside other ways.

Run `python benchmarks/gpu_check.py` where CUDA is. It tries every Triton kernel against its formula, and a model of the
shape of Qwen2.5-1.5B with random weights, with LoRA and in full, 4 x 2560 tokens in bf16: a profile, gradients under
exact and compressed plans, peaks as predicted, allocated and reserved, and the comparison that `hilore bench` makes.
Every line is printed as soon as it is known; a check that no longer fits into the time is named and left out. Ends with
code 1 if something that was checked is not as it should be.

Without CUDA it says so, and takes the same way with the kernels in Triton's interpreter and a tiny model on the CPU.
That shows that the parts fit together, and nothing about a GPU.

How long each check takes on a GPU is an estimate: no figure in this file was measured on one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_plans import CPU, GPU, Check, Line, Setup, release

from hilore_plan.profiler.repeatable import repeatable_environment

SECONDS = 470.0


def kernels(left: Callable[[], float]) -> Iterator[Line]:
    """The kernels, in a process of their own, which prints its lines itself."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).with_name("gpu_kernels.py"))]
    done = subprocess.run(command, env={**os.environ, **interpreted}, check=False, timeout=left())
    yield Line("every kernel gives what its formula gives", done.returncode == 0)


class OutOfTimeError(Exception):
    """The time that this script may take is over."""


class Run:
    """Runs checks while there is time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def run(self, check: Check, *, estimate: bool) -> None:
        """One check, if it is likely to end in time."""
        print(f"{check.name} ({self.left():.0f} s left)", flush=True)
        if self.left() < (check.seconds if estimate else 1):
            self.left_out.append(check.name)
            print(f"  left out: it may take {check.seconds:.0f} s", flush=True)
            return
        signal.setitimer(signal.ITIMER_REAL, max(self.left(), 0.001))
        try:
            passed = [self._print(line) for line in check.lines()]
        except (OutOfTimeError, subprocess.TimeoutExpired):
            self.left_out.append(check.name)
            passed = [self._print(Line("stopped: out of time"))]
        except Exception as error:  # noqa: BLE001 - it is a line of its own, and the other checks run all the same
            passed = [self._print(Line(f"{type(error).__name__}: {error}", passed=False))]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            release()
        if not all(passed):
            self.failed.append(check.name)

    def _print(self, line: Line) -> bool:
        print(line, flush=True)
        return line.passed is not False


def main() -> int:
    """Runs everything and says how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time to take (default {SECONDS:.0f})")
    options = parser.parse_args()
    there = torch.cuda.is_available()
    os.environ.update({name: value for name, value in repeatable_environment().items() if name not in os.environ})
    signal.signal(signal.SIGALRM, _out_of_time)
    name = torch.cuda.get_device_name() if there else "no CUDA device: a tiny model on the CPU, nothing about a GPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    setups = [Setup("LoRA", 16 if there else 4, GPU if there else CPU), Setup("full", 0, GPU if there else CPU)]
    run = Run(options.seconds)
    checks = [Check("kernels", 60, lambda: kernels(run.left)), *(c for setup in setups for c in setup.checks())]
    for check in [*checks, *(setup.comparison() for setup in setups)]:
        run.run(check, estimate=there)
    print(f"failed: {', '.join(run.failed) or 'nothing'}; left out: {', '.join(run.left_out) or 'nothing'}")
    return int(bool(run.failed))


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError


if __name__ == "__main__":
    sys.exit(main())
