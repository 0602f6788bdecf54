"""The bar: two real workloads from profile to comparison, one table each, and whether each requirement is met.

Run `python benchmarks/bar.py`, or with `--quick` for small sizes that only show that the parts fit together. Ends with
code 1 if a requirement is not met.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hilore_plan.bench.modes import AGAINST, PLAN
from hilore_plan.bench.pairs import run_bench
from hilore_plan.bench.verify import verify_plan
from hilore_plan.cli import rows, ui
from hilore_plan.integrations.profile_source import profile_model
from hilore_plan.planner.plan import solve_plan
from hilore_plan.profiler.malloc import reexec_with_malloc_settings
from hilore_plan.quantities import format_bytes, format_seconds
from hilore_plan.schema.bench import Bench, ModeResult
from hilore_plan.schema.io import save

BUDGET = "1.1x-gc"
PEAK = 1.10


@dataclass(frozen=True)
class Bar:
    """A workload, and the throughput over checkpointing's that the plan has to reach."""

    source: str
    batch: int
    prompt_tokens: int
    response_tokens: int
    throughput: float


BARS = (
    Bar("builtin:qwen2-mini", 2, 256, 512, 1.12),
    Bar("builtin:smollm2-135m", 4, 64, 192, 1.10),
)
QUICK = (Bar("builtin:tiny-llama", 2, 16, 48, 1.0),)


def measure(bar: Bar, folder: Path, pairs: int) -> Bench:
    """Profile, plan with verification, comparison; every file is left in `folder`."""
    name = bar.source.rpartition(":")[2]
    with ui.progress() as progress:
        profile = profile_model(
            bar.source,
            batch=bar.batch,
            prompt_tokens=bar.prompt_tokens,
            response_tokens=bar.response_tokens,
            progress=progress,
        )
        save(profile, folder / f"{name}.profile.json")
        plan = verify_plan(solve_plan(profile, budget=BUDGET, progress=progress), profile, progress=progress)
        save(plan, folder / f"{name}.plan.json")
        bench = run_bench(plan, against=AGAINST, pairs=pairs, progress=progress)
        save(bench, folder / f"{name}.bench.json")
    return bench


def verdicts(bar: Bar, bench: Bench) -> Iterator[tuple[str, bool]]:
    """Each requirement in words, and whether it is met."""
    modes = {mode.name: mode for mode in bench.modes}
    plan = modes[PLAN]
    yield f"gradient error {plan.gradient_error} is 0.0", plan.gradient_error == 0.0
    yield f"peak {plan.peak_vs_gc:.3f} of gc's is at most {PEAK}", plan.peak_vs_gc <= PEAK
    reached = plan.throughput_vs_gc
    yield f"throughput {reached:.3f} of gc's is at least {bar.throughput}", reached >= bar.throughput
    for other in _rivals(modes.values()):
        yield f"faster than {other.name} ({other.throughput_vs_gc:.3f})", reached > other.throughput_vs_gc
    yield from _predictions(plan)


def _rivals(modes: object) -> list[ModeResult]:
    """The modes with which a plan has to compete: those whose peak is within the bar."""
    return [mode for mode in modes if mode.name != PLAN and mode.peak_vs_gc <= PEAK]  # type: ignore[attr-defined]


def _predictions(plan: ModeResult) -> Iterator[tuple[str, bool]]:
    if plan.predicted is None:
        return
    peak = plan.predicted.peak_bytes / plan.peak_bytes - 1
    seconds = plan.predicted.step_seconds / plan.step_seconds.median - 1
    yield f"predicted peak {format_bytes(plan.predicted.peak_bytes)} is within 5 % ({peak:+.1%})", abs(peak) <= 0.05
    predicted = format_seconds(plan.predicted.step_seconds)
    yield f"predicted step {predicted} is within 10 % ({seconds:+.1%})", abs(seconds) <= 0.10


def main() -> int:
    """Runs every bar and says how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that the parts fit together")
    parser.add_argument("--only", choices=[bar.source for bar in BARS], help="run this workload alone")
    parser.add_argument("--pairs", type=int, default=7, help="rounds of timing (default 7)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the files (default out/bench)")
    options = parser.parse_args()
    reexec_with_malloc_settings()
    options.out.mkdir(parents=True, exist_ok=True)
    met = True
    for bar in QUICK if options.quick else [bar for bar in BARS if options.only in (None, bar.source)]:
        bench = measure(bar, options.out, options.pairs)
        ui.show_tables([rows.bench_modes(bench)])
        print(f"{bar.source} on {bench.environment.device_name}, torch {bench.environment.torch}, {BUDGET}")
        for text, passed in verdicts(bar, bench):
            met = met and passed
            print(f"  {'met   ' if passed else 'NOT MET'} {text}")
    print(f"files: {options.out}{os.sep}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
