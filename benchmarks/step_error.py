"""The gradient error of a complete step under a plan, beside what the plan promised and the runtime expected.

Run `python benchmarks/step_error.py PLAN [--micro-batches 16] [--rows 2] [--seed 1]` with a plan that compresses. The
step's micro-batches are rollouts that the calibration has not seen: another seed of prompts, completions and rewards.
Compute is in the plan's dtype. In fp32, ends with code 1 if the error is above the plan's limit, or not within a factor
of 1.5 of what was expected. In another dtype gradients differ from those in fp32 anyway: that is shown, with the plan
and without, and nothing is judged.
"""

from __future__ import annotations

import argparse
import sys

import torch
from steps import exposures_of, relative_error, step_gradients

from hilore_plan.integrations.builtin_models import build
from hilore_plan.integrations.calibration_text import calibration_text
from hilore_plan.profiler.batches import ROWS, text_data
from hilore_plan.profiler.fp32 import in_fp32
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.meter import Meter
from hilore_plan.schema.io import load_plan

FACTOR = 1.5


def main() -> int:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a micro-batch; more of them use larger entries")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    plan = load_plan(options.plan)
    if plan.risk is None:
        print("the plan compresses nothing: its gradients are exact")
        return 0
    loaded = build(plan.workload.source, dtype=plan.workload.dtype, attention=plan.workload.attention)
    text = calibration_text(loaded, -(-options.micro_batches * options.rows // ROWS), seed=options.seed)
    batches = text_data(text, torch.device("cpu"), rows=options.rows).batches[: options.micro_batches]
    exposures = exposures_of(batches)
    model = loaded.model.train()
    with apply(model, plan) as runtime:
        step_gradients(model, batches[:1], exposures[:1], runtime)  # the first frames are kept until they are trusted
        runtime.meter = Meter()
        mine = step_gradients(model, batches, exposures, runtime)
        report = runtime.report()
    exact = step_gradients(model, batches, exposures, None)
    error, expected = relative_error(mine, exact), report.expected_error
    print(text.source)
    print(f"exposures {', '.join(f'{exposure:.2f}' for exposure in exposures)}")
    print(report)
    print(f"error {error:.5f}, expected {expected:.5f}, limit {plan.risk.limit:.5f}")
    with in_fp32(model) as narrow:
        if narrow:
            wide = step_gradients(model, batches, exposures, None)
            with_plan, without = relative_error(mine, wide), relative_error(exact, wide)
            print(f"from fp32 the gradient differs by {with_plan:.5f} with the plan, {without:.5f} without")
            return 0
    return int(error > plan.risk.limit or not 1 / FACTOR <= error / max(expected, 1e-12) <= FACTOR)


if __name__ == "__main__":
    sys.exit(main())
