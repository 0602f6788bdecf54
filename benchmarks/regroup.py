"""What regrouping and leaving out silent rows give: step times on rollouts of which some have no advantage.

Run `python benchmarks/regroup.py [--plan PLAN] [--quick]`. Rows of text with completions of any length, in groups that
share a prompt; in 0, 30 and 60 % of the groups all rewards are equal. The loss is dapo's, the compute fp32. The plan is
one for these sizes that is calibrated first (which takes minutes), unless it is given. Each kind of step runs plain and
under the plan; times are those of forward and backward in seconds, the kinds in turn, the median of `--rounds`. Micro-
batches are padded to their own longest row throughout: where a trainer pads to the longest of a generation, as TRL 1.16
does, there is more to be won.

Ends with code 1, without times, if a plain step's gradient is another than that of the rows as they were.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from steps import Gradients, relative_error
from torch import nn

from hilore_plan.exposure import Row, leave_out, regroup
from hilore_plan.exposure.normalisers import normaliser_for
from hilore_plan.exposure.rollouts import group_advantages
from hilore_plan.integrations.builtin_models import LoadedModel, build
from hilore_plan.integrations.calibration_text import arithmetic_prompts
from hilore_plan.integrations.profile_source import profile_model
from hilore_plan.integrations.trl_regroup import settings_for
from hilore_plan.planner.plan import solve_plan
from hilore_plan.profiler.batches import LOSS, CalibrationBatch, Sample, text_batch
from hilore_plan.profiler.clock import interleaved_seconds
from hilore_plan.profiler.malloc import reexec_with_malloc_settings
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.meter import LEAST, Meter
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

CPU = torch.device("cpu")
SHARES = (0.0, 0.3, 0.6)
KINDS = ("as they were", "left out", "regrouped", "both")
# fp32: the same few thousand terms in another order
SAME = 1e-4


@dataclass(frozen=True)
class Sizes:
    """A step: rows, in groups of equal prompts, in micro-batches; tokens of a prompt and of the longest completion."""

    model: str = "builtin:smollm2-135m"
    rows: int = 32
    group: int = 4
    micro_batches: int = 8
    prompt: int = 32
    longest: int = 192


QUICK = Sizes("builtin:tiny-llama", rows=16, micro_batches=4, prompt=4, longest=24)


def rollouts(sizes: Sizes, loaded: LoadedModel, share: float, seed: int) -> list[Sample]:
    """Rows in the order of their groups; lengths are spread as those of answers are, some cut at the longest."""
    draw = random.Random(seed)  # noqa: S311 - nothing here is secret
    groups = sizes.rows // sizes.group
    flat = set(draw.sample(range(groups), round(share * groups)))
    samples: list[Sample] = []
    for group, text in enumerate(arithmetic_prompts(groups, seed)):
        right = draw.randint(1, sizes.group - 1)
        rewards = [1.0 if group in flat or row < right else 0.0 for row in range(sizes.group)]
        for advantage in group_advantages(rewards, [group] * sizes.group):
            length = min(sizes.longest, max(1, round(sizes.longest * draw.lognormvariate(-1.0, 0.7))))
            ids = tokens_of(loaded, text, sizes.prompt + length, draw)
            samples.append(Sample(ids[: sizes.prompt], ids[sizes.prompt :], advantage))
    draw.shuffle(samples)  # as TRL does
    return samples


def tokens_of(loaded: LoadedModel, text: str, count: int, draw: random.Random) -> tuple[int, ...]:
    """So many tokens of a text, again and again; of nothing where there is no tokenizer."""
    if loaded.tokenizer is None:
        return tuple(draw.randrange(loaded.vocab_size) for _ in range(count))
    ids = loaded.tokenizer(text + " ").input_ids
    return tuple(ids[place % len(ids)] for place in range(count))


@dataclass
class Step:
    """One kind of step; `runtime` is None where it runs plain. Each has its own mean exposure."""

    name: str
    batches: list[CalibrationBatch]
    padded_tokens: int
    left_out: int
    model: nn.Module
    runtime: Runtime | None
    meter: Meter = field(default_factory=Meter)

    def __call__(self) -> None:
        """Forward and backward of every micro-batch."""
        self.model.zero_grad(set_to_none=True)
        if self.runtime is not None:
            self.runtime.meter = self.meter
        for batch in self.batches:
            if self.runtime is None:
                loss = batch.loss(self.model)
            else:
                with self.runtime.microbatch(exposure=self.meter.relative(batch.exposure)):
                    loss = batch.loss(self.model)
            loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self) -> Gradients:
        """Those of one step."""
        self()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]


def steps_of(
    samples: Sequence[Sample], sizes: Sizes, plan: Plan, runs: Sequence[tuple[nn.Module, Runtime | None]]
) -> list[Step]:
    """Every kind of step, on every model."""
    tokens = sum(len(sample.completion) for sample in samples)
    normaliser = normaliser_for(LOSS, accumulation=sizes.micro_batches, tokens=tokens)
    rows = [
        Row(len(s.prompt) + len(s.completion), abs(s.advantage) * len(s.completion) ** 0.5, s.advantage == 0)
        for s in samples
    ]
    count, saving = sizes.micro_batches, settings_for(plan).saving
    size = len(rows) // count
    given = [range(start, start + size) for start in range(0, len(rows), size)]
    found = {"left out": leave_out(rows, count, loss=LOSS, normaliser=normaliser)}
    for name in ("regrouped", "both"):
        found[name] = regroup(
            rows, count, loss=LOSS, normaliser=normaliser, saving=saving, leave_out_silent=name == "both"
        )
    made: list[Step] = []
    for name in KINDS:
        groups = found[name].micro_batches if name in found else given
        batches = [text_batch([samples[i] for i in group], tokens, CPU) for group in groups]
        padded = found[name].padded_tokens if name in found else found["left out"].padded_tokens_before
        left_out = len(found[name].left_out) if name in found else 0
        exposures = [batch.exposure for batch in batches]
        mean = sum(exposures) / len(exposures)
        made += [
            Step(name, batches, padded, left_out, model, runtime, Meter(seen=LEAST, mean=mean))
            for model, runtime in runs
        ]
    return made


def make_plan(sizes: Sizes, progress: str) -> Plan:
    """A plan for micro-batches of these sizes, calibrated."""
    print(progress, file=sys.stderr)
    profile = profile_model(
        sizes.model,
        batch=sizes.rows // sizes.micro_batches,
        prompt_tokens=sizes.prompt,
        response_tokens=sizes.longest,
        dtype="float32",
        token_points=2,
        codecs=("int8", "int4"),
        calibration_microbatches=8,
    )
    return solve_plan(profile, budget="1.1x-gc")


def compare(steps: Sequence[Step], rounds: int, share: float) -> bool:
    """Checks gradients and prints a table; whether all was well."""
    exact = steps[0].gradients()
    errors = [relative_error(step.gradients(), exact) for step in steps]
    wrong = [step.name for step, error in zip(steps, errors, strict=True) if step.runtime is None and error > SAME]
    if wrong:
        print(f"{share:.0%} without advantage: another gradient where rows are {', '.join(wrong)}: {errors}")
        return False
    seconds = [statistics.median(taken) for taken in interleaved_seconds(steps, CPU, rounds=rounds)]
    print(f"{share:.0%} of the groups without advantage")
    print(f"{'rows':<14}{'tokens':>8}{'left out':>10}{'plain':>10}{'':>8}{'plan':>10}{'':>8}{'error':>10}")
    for plain, planned in zip(range(0, len(steps), 2), range(1, len(steps), 2), strict=True):
        step = steps[plain]
        print(
            f"{step.name:<14}{step.padded_tokens:>8}{step.left_out:>10}"
            f"{seconds[plain]:>10.3f}{seconds[0] / seconds[plain]:>7.2f}x"
            f"{seconds[planned]:>10.3f}{seconds[1] / seconds[planned]:>7.2f}x{errors[planned]:>10.4f}"
        )
    return True


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="of the same model in fp32; default: one is made")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: whether all works")
    options = parser.parse_args()
    reexec_with_malloc_settings()
    sizes = QUICK if options.quick else Sizes()
    plan = load_plan(options.plan) if options.plan else make_plan(sizes, "making a plan ...")
    plain, planned = (build(sizes.model, dtype="float32") for _ in range(2))
    with apply(planned.model, plan) as runtime:
        runs = ((plain.model, None), (planned.model, runtime))
        fine = [
            compare(steps_of(rollouts(sizes, plain, share, options.seed), sizes, plan, runs), options.rounds, share)
            for share in SHARES
        ]
    if plan.risk is not None:
        print(f"error: of the whole step's gradient under the plan, whose limit is {plan.risk.limit:.4f}")
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
