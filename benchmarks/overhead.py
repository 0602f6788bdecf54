"""What everything around training costs, each figure beside its limit.

Run `python benchmarks/overhead.py` on a machine that does little else; `--quick` leaves out the profiles, which take up
to a quarter of an hour. Seconds are those of a clock on the wall and decide; CPU seconds, of all threads, tell how much
of them is the machine's. Start-up and reading files: the median of five. Ends with code 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hilore_plan.integrations.builtin_models import build
from hilore_plan.profiler.malloc import reexec_with_malloc_settings
from hilore_plan.runtime.attach import apply
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
ATTACHED = ROOT / "plans" / "smollm2-135m.json"
TOKENS = 16
ROUNDS = 5

HELP_LIMIT = 0.5
SHOW_LIMIT = 1.5
ATTACH_LIMIT = 15.0
PROFILES = (
    ("builtin:qwen2-mini", (), 180.0),
    ("builtin:smollm2-135m", ("--codecs", "int8,fp8_e4m3,int4"), 600.0),
)


@dataclass(frozen=True)
class Figure:
    """Something that was timed."""

    name: str
    seconds: float
    cpu_seconds: float
    limit_seconds: float

    @property
    def met(self) -> bool:
        """Whether it is within its limit."""
        return self.seconds <= self.limit_seconds

    def __str__(self) -> str:
        figures = f"{self.seconds:9.2f}{self.cpu_seconds:9.2f}{self.limit_seconds:9.2f}"
        return f"{self.name:48}{figures}  {'met' if self.met else 'NOT MET'}"


def figures(*, quick: bool) -> Iterator[Figure]:
    """Every figure, cheap ones first."""
    yield command("hilore --help", ["--help"], HELP_LIMIT)
    for file in sorted((*ROOT.glob("profiles/*.json"), *ROOT.glob("plans/*.json"))):
        short = str(file.relative_to(ROOT))
        yield command(f"hilore show {short}", ["show", str(file)], SHOW_LIMIT)
    yield from attaching(load_plan(ATTACHED))
    for source, options, limit in () if quick else PROFILES:
        yield profiling(source, options, limit)


def command(name: str, arguments: list[str], limit: float) -> Figure:
    """The median of some runs of one command, its output thrown away."""
    runs = [child(arguments, output=subprocess.DEVNULL) for _ in range(ROUNDS)]
    return Figure(name, *(statistics.median(column) for column in zip(*runs, strict=True)), limit)


def profiling(source: str, options: tuple[str, ...], limit: float) -> Figure:
    """One profile with the defaults, as a user makes it; its progress is shown."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["profile", source, *options, "-o", str(Path(folder) / "profile.json")]
        seconds, cpu_seconds = child(arguments, output=None)
    return Figure(" ".join(["hilore profile", source, *options]), seconds, cpu_seconds, limit)


def child(arguments: list[str], output: int | None) -> tuple[float, float]:
    """Seconds and CPU seconds of one `hilore` command."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "hilore_plan", *arguments], check=True, stdout=output, stderr=output)
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used


def attaching(plan: Plan) -> Iterator[Figure]:
    """`apply`, what the first step costs beyond the second one, and both together, which is what has a limit."""
    workload = plan.workload
    model = build(workload.source, dtype=workload.dtype, attention=workload.attention).model
    ids = torch.randint(0, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    update(model, ids)  # whatever torch and the model do once, they have done
    runtimes = []
    attached = timed(lambda: runtimes.append(apply(model, plan)))
    first = timed(lambda: update(model, ids))
    second = timed(lambda: update(model, ids))
    report = runtimes[0].report()
    runtimes[0].detach()
    capture = [max(0.0, one - other) for one, other in zip(first, second, strict=True)]
    blocks = f"{len(plan.block_names)} blocks"
    yield Figure(f"attach to {blocks}", *attached, ATTACH_LIMIT)
    yield Figure(f"first step's capture and trial, {report.captures} graph", *capture, ATTACH_LIMIT)
    yield Figure("both together", *(map(sum, zip(attached, capture, strict=True))), ATTACH_LIMIT)


def update(model: nn.Module, ids: torch.Tensor) -> None:
    """Forward and backward of a few tokens."""
    model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and CPU seconds of a piece of work in this process."""
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu_started


def main() -> int:
    """Prints each figure as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the profiles")
    options = parser.parse_args()
    reexec_with_malloc_settings()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':48}{'seconds':>9}{'CPU s':>9}{'limit':>9}")
    missed = 0
    for figure in figures(quick=options.quick):
        print(figure, flush=True)
        missed += not figure.met
    print("every limit is met" if not missed else f"{missed} of the limits are not met")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
