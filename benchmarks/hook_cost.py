"""What the hooks alone cost: steps of `builtin:qwen2-mini` under a plan that stores everything, and without a plan.

Run `python benchmarks/hook_cost.py`; pairs are interleaved in one process. Ends with code 1 above two per cent.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from hilore_plan.integrations.builtin_models import build
from hilore_plan.profiler.clock import seconds_of
from hilore_plan.profiler.malloc import reexec_with_malloc_settings
from hilore_plan.profiler.step import ActorStep
from hilore_plan.runtime.attach import apply
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

LIMIT = 1.02


def store_all(plan: Plan) -> Plan:
    """The plan with every action replaced by `store`."""
    entries = [
        entry.model_copy(
            update={
                "groups": tuple(
                    group.model_copy(update={"actions": dict.fromkeys(group.actions, "store")})
                    for group in entry.groups
                )
            }
        )
        for entry in plan.entries
    ]
    return plan.model_copy(update={"entries": tuple(entries)})


def main() -> int:
    """Measures the pairs and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="plans/qwen2-mini.json")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    reexec_with_malloc_settings()
    plan = store_all(load_plan(options.plan))
    loaded = build(plan.workload.source, dtype=plan.workload.dtype, attention=plan.workload.attention)
    device = torch.device("cpu")
    step = ActorStep(loaded.model, plan.workload, vocab_size=loaded.vocab_size, device=device)
    runtime = apply(loaded.model, plan)
    step.step(runtime)  # captures and checks
    runtime.detach()
    plain, planned = [], []
    for _ in range(options.pairs):
        plain.append(seconds_of(step.step, device))
        with apply(loaded.model, plan) as attached:
            attached.variants = runtime.variants
            for block, before in zip(attached._blocks, runtime._blocks, strict=True):
                block.stored = before.stored  # checked already
            planned.append(seconds_of(lambda current=attached: step.step(current), device))
    cost = statistics.median(slow / fast for slow, fast in zip(planned, plain, strict=True))
    print(f"without a plan {statistics.median(plain):.3f} s, storing everything {statistics.median(planned):.3f} s")
    print(f"median ratio of {options.pairs} pairs: {cost:.4f} (limit {LIMIT})")
    return int(cost > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
