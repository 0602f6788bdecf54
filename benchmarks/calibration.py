"""Calibration of `builtin:smollm2-135m`: what it takes, and how well it predicts the error of mixes that it never saw.

Run `python benchmarks/calibration.py`, or with `--quick` on a tiny random model that only shows that the parts fit
together. Prints predicted and measured error of every mix; ends with code 1 if a requirement is not met: of the mixes
whose measured error is between 0.003 and 0.1, nine in ten predicted within 0.7 to 1.4 of it, none less than 1/1.6.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

from hilore_plan.graph.blocks import find_blocks
from hilore_plan.integrations.builtin_models import build
from hilore_plan.integrations.calibration_text import calibration_text
from hilore_plan.profiler.batches import text_data
from hilore_plan.profiler.calibration import calibrate
from hilore_plan.profiler.calls import record_calls
from hilore_plan.profiler.classes import find_classes
from hilore_plan.quantities import format_seconds
from hilore_plan.schema.profile import Mix, Risk

SOURCE = "builtin:smollm2-135m"
QUICK = "builtin:tiny-llama"
LOWEST, HIGHEST = 0.003, 0.1
WITHIN = (0.7, 1.4)
WORST = 1 / 1.6
SECONDS = 12 * 60


class Lines:
    """Progress as lines of text."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def start(self, title: str, total: int) -> None:
        """See `Progress.start`."""
        print(f"{title} ({total} steps)", flush=True)

    def advance(self, detail: str = "") -> None:
        """See `Progress.advance`."""
        print(f"  {time.perf_counter() - self._begun:6.0f} s  {detail}", flush=True)

    def finish(self) -> None:
        """See `Progress.finish`."""


def risk_of(source: str, options: argparse.Namespace) -> Risk:
    """The calibrated risk of a model, seconds printed on the way."""
    loaded = build(source, dtype=options.dtype, lora_rank=options.lora_rank)
    begun = time.perf_counter()
    text = calibration_text(loaded, options.microbatches, rollouts=options.rollouts)
    print(f"text: {text.source}; {format_seconds(time.perf_counter() - begun)}")
    data = text_data(text, torch.device("cpu"))
    blocks = [block for _, block in find_blocks(loaded.model)]
    classes = find_classes(blocks, record_calls(blocks, lambda: data.batches[0].loss(loaded.model)))
    return calibrate(loaded.model, blocks, classes, data, options.codecs.split(","), Lines(), mixes=options.mixes)


def show(risk: Risk) -> None:
    """Every unit and codec, summed over all blocks, and every mix."""
    print(f"damping {risk.damping:.3f}, noise {risk.noise}, {risk.micro_batches} micro-batches")
    print("exposures " + " ".join(f"{value:.2f}" for value in sorted(risk.exposures.values)))
    for unit in (unit for units in risk.units for unit in units):
        local, propagated = sum(unit.local), sum(unit.propagated)
        error = (local + risk.damping * propagated) ** 0.5
        print(f"  {unit.unit:34s} {unit.codec:10s} {local**0.5:.4f} {propagated**0.5:.4f} -> {error:.4f}")
    for mix in risk.held_out:
        print(f"  mix of {mix.units:4d}: predicted {mix.predicted:.4f} measured {mix.measured:.4f} {_ratio(mix):.2f}")


def _ratio(mix: Mix) -> float:
    return mix.predicted / mix.measured


def main() -> int:
    """Calibrates, and says how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that the parts fit together")
    parser.add_argument("--dtype", default="float32", help="the model's dtype (default float32)")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--codecs", default="int8,fp8_e4m3,int4")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--mixes", type=int, default=10, help="mixes on the micro-batches kept aside (default 10)")
    parser.add_argument("--rollouts", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="file for the risk as JSON")
    options = parser.parse_args()
    begun = time.perf_counter()
    risk = risk_of(QUICK if options.quick else SOURCE, options)
    seconds = time.perf_counter() - begun
    show(risk)
    if options.out is not None:
        options.out.write_text(risk.model_dump_json(), encoding="utf-8")
    judged = [_ratio(mix) for mix in risk.held_out if LOWEST <= mix.measured <= HIGHEST]
    within = [ratio for ratio in judged if WITHIN[0] <= ratio <= WITHIN[1]]
    met = bool(judged) and len(within) >= 0.9 * len(judged) and min(judged) >= WORST
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'met' if met else 'NOT MET'}: {len(within)} of {len(judged)} within {WITHIN[0]} to {WITHIN[1]}")
    print(
        f"{'met' if seconds <= SECONDS else 'NOT MET'}: {format_seconds(seconds)} on {torch.get_num_threads()} threads"
    )
    print(f"peak of the process {peak:.2f} GiB")
    return 0 if met and (options.quick or seconds <= SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())
