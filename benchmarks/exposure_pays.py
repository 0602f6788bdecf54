"""What it is worth to plan by exposure: the same planner with and without it, at an equal measured gradient error.

Run `python benchmarks/exposure_pays.py PROFILE [--zero 0,0.33,0.6] [--rounds 7]`; the profile is calibrated, of a
builtin. For every share of rows without advantage a step of micro-batches is made, once with rows as they come
(shuffled, as TRL does) and once with whole micro-batches without signal (as after regrouping). One plan is made with
exposure buckets from that step, and one that knows a single exposure; the second one's risk is tuned until both steps
err equally, measured against the exact gradient. Then both steps run in turn, forward and backward, on two copies of
the model in fp32.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from steps import Gradients, exposures_of, relative_error, step_gradients
from torch import nn

from hilore_plan.integrations.builtin_models import LoadedModel, build
from hilore_plan.integrations.calibration_text import COMPLETION_TOKENS, PROMPT_TOKENS, calibration_text
from hilore_plan.planner.plan import solve_plan
from hilore_plan.profiler.batches import GROUP, ROWS, CalibrationBatch, CalibrationText, Sample, text_data
from hilore_plan.profiler.malloc import reexec_with_malloc_settings
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.lookup import Lookup
from hilore_plan.schema.io import load_profile
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Exposures, Profile

CLOSE = 0.03  # the two measured errors may differ by so much
TRIES = 5


@dataclass(frozen=True)
class Step:
    """The micro-batches of one step and their exposures, relative to the mean."""

    batches: Sequence[CalibrationBatch]
    exposures: tuple[float, ...]


def step_of(samples: Sequence[Sample], zero: float, rows: int, whole: bool) -> Step:
    """A step in which about a share `zero` of the groups has no advantage.

    Args:
        samples: rows, `GROUP` of each prompt together.
        zero: the share.
        rows: of a micro-batch.
        whole: whether rows of a kind are put together; else they are shuffled.
    """
    choose = random.Random(0)  # noqa: S311 - which rows carry a signal is no secret
    groups = list(range(len(samples) // GROUP))
    silent = set(choose.sample(groups, round(zero * len(groups))))
    signs = [choose.choice((1.0, -1.0)) for _ in samples]
    made = [
        replace(sample, advantage=0.0 if place // GROUP in silent else signs[place])
        for place, sample in enumerate(samples)
    ]
    if whole:
        made.sort(key=lambda sample: abs(sample.advantage))
    else:
        choose.shuffle(made)
    batches = text_data(CalibrationText(tuple(made), ""), torch.device("cpu"), rows=rows).batches
    return Step(batches, exposures_of(batches))


def gradient(model: nn.Module, step: Step, runtime: Runtime | None) -> Gradients:
    """The accumulated gradients of one step."""
    return step_gradients(model, step.batches, step.exposures, runtime)


def with_exposures(profile: Profile, values: tuple[float, ...]) -> Profile:
    """The profile as if its rollouts had had these exposures."""
    assert profile.risk is not None
    seen = Exposures(norm=profile.risk.exposures.norm, mean=profile.risk.exposures.mean, values=values)
    return profile.model_copy(update={"risk": profile.risk.model_copy(update={"exposures": seen})})


def measured_error(model: nn.Module, plan: Plan, step: Step, exact: Gradients) -> float:
    """The error of the step under a plan."""
    with apply(model, plan) as runtime:
        one = Step(step.batches[:1], (max(step.exposures),))
        gradient(model, one, runtime)  # the first frames are kept whole until they are trusted
        return relative_error(gradient(model, step, runtime), exact)


def plan_at(profile: Profile, step: Step, budget: str, risk: float, buckets: int) -> Plan:
    """The plan for a step; with one bucket the planner sees equal exposures."""
    values = step.exposures if buckets > 1 else tuple(1.0 for _ in step.exposures)
    seen = with_exposures(profile, values)
    return solve_plan(seen, budget=budget, risk=repr(risk), token_buckets=1, exposure_buckets=buckets)


def alike(
    model: nn.Module, profile: Profile, step: Step, budget: str, wanted: float, exact: Gradients
) -> tuple[Plan, float]:
    """The plan without exposure whose measured error is nearest to the one wanted, in a few tries."""
    risk, best = wanted, (plan_at(profile, step, budget, wanted, 1), math.inf)
    for _ in range(TRIES):
        plan = plan_at(profile, step, budget, risk, 1)
        found = measured_error(model, plan, step, exact)
        if abs(found / wanted - 1) < abs(best[1] / wanted - 1):
            best = (plan, found)
        if abs(found / wanted - 1) <= CLOSE or found == 0:
            break
        risk *= wanted / found
    return best


def seconds(models: Sequence[nn.Module], plans: Sequence[Plan], step: Step, rounds: int) -> list[list[float]]:
    """Seconds of the step under each plan, in turn; the order changes from round to round."""
    runtimes = [apply(model, plan) for model, plan in zip(models, plans, strict=True)]
    took: list[list[float]] = [[] for _ in plans]
    for number in range(-1, rounds):
        order = range(len(plans)) if number % 2 else reversed(range(len(plans)))
        for place in order:
            started = time.perf_counter()
            gradient(models[place], step, runtimes[place])
            if number >= 0:
                took[place].append(time.perf_counter() - started)
    for runtime in runtimes:
        runtime.detach()
    return took


def predicted(plan: Plan, step: Step) -> float:
    """Seconds of recomputation and codecs in the step, as the plan predicts them."""
    lookup, total = Lookup(plan), 0.0
    for number, exposure in enumerate(step.exposures):
        found = lookup.find(plan.entries[-1].tokens_up_to, exposure, "live" if number else "none")
        assert found is not None
        total += plan.entries[found].predicted.recompute_seconds / plan.workload.micro_batches
    return total


def compare(models: Sequence[nn.Module], profile: Profile, step: Step, options: argparse.Namespace) -> None:
    """Prints one line: errors, seconds and what exposure gains."""
    exact = gradient(models[0], step, None)
    bucketed = plan_at(profile, step, options.budget, options.risk, 4)
    mine = measured_error(models[0], bucketed, step, exact)
    ignoring, theirs = alike(models[0], profile, step, options.budget, mine, exact)
    expected = [predicted(plan, step) for plan in (bucketed, ignoring)]
    line = f"errors {mine:.4f} / {theirs:.4f}; predicted extra {expected[0]:.2f} / {expected[1]:.2f} s"
    if options.rounds:
        first, second = seconds(models, (bucketed, ignoring), step, options.rounds)
        gain = statistics.median(b / a for a, b in zip(first, second, strict=True)) - 1
        medians = f"{statistics.median(first):.2f} / {statistics.median(second):.2f} s"
        line += f"; measured step {medians}: {gain:+.1%}"
    print(line, flush=True)


def main() -> int:
    """Every share of silent rows, shuffled and whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--budget", default="1.1x-gc")
    parser.add_argument("--risk", type=float, default=0.015)
    parser.add_argument("--zero", default="0,0.33,0.6", help="shares of rows without advantage")
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7, help="0 prints predictions only")
    options = parser.parse_args()
    reexec_with_malloc_settings()
    profile = load_profile(options.profile)
    models, samples, rows = loaded_twice(profile, options.micro_batches)
    for zero in map(float, options.zero.split(",")):
        for whole in (False, True) if zero else (False,):
            step = step_of(samples, zero, rows, whole)
            kind = "whole micro-batches" if whole else "shuffled rows"
            shown = " ".join(f"{e:.2f}" for e in sorted(step.exposures))
            print(f"{zero:.0%} without advantage, {kind}: exposures {shown}", flush=True)
            compare(models, profile, step, options)
    return 0


def loaded_twice(profile: Profile, micro_batches: int) -> tuple[list[nn.Module], Sequence[Sample], int]:
    """Two copies of the model, rows for the micro-batches, and rows in each so that it is as large as the profile's."""
    workload = profile.workload
    copies: list[LoadedModel] = [
        build(workload.source, dtype="float32", attention=workload.attention) for _ in range(2)
    ]
    rows = max(1, workload.tokens // (PROMPT_TOKENS + COMPLETION_TOKENS))
    text = calibration_text(copies[0], -(-micro_batches * rows // ROWS))
    return [copy.model.train() for copy in copies], text.samples[: micro_batches * rows], rows


if __name__ == "__main__":
    sys.exit(main())
