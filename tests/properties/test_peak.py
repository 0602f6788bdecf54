"""Random blocks under random plans: the peak that the simulator says, against measured allocations."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import plans
import pytest
import random_blocks
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from models import VOCABULARY
from random_blocks import Model, Move
from torch import nn

from hilore_plan.codecs import registry
from hilore_plan.planner.inexact import UnrecoverableError
from hilore_plan.planner.simulate import simulate
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.profiler import profile as profile_file
from hilore_plan.profiler.peaks import measure_peak
from hilore_plan.profiler.profile import profile_module
from hilore_plan.profiler.step import ActorStep, MicroBatch
from hilore_plan.runtime.alarm import Alarm
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.microbatch import Microbatch
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.plan import Action
from hilore_plan.schema.profile import BlockClass, ClassMeasure, Profile
from hilore_plan.schema.record import GradientState, Workload

WORKLOAD = Workload(
    source="builtin:none",
    dtype="float32",
    attention="sdpa",
    head="full",
    batch=4,
    prompt_tokens=28,
    response_tokens=100,
)
CPU = torch.device("cpu")
PLANS = 2
ROUNDING = 64  # what the CPU's allocator rounds up to
RELEASED_LATE = Model(
    (Move("in place", 1), Move("in place", 1), Move("scores", 1, 3), Move("gate", 1), Move("gate", 0, 2), Move("add")),
    dtype=torch.bfloat16,
    waste=False,
)
HELD_IN_FORWARD = Model(
    (Move("tanh"), Move("added", 2, 2), Move("spread", 2, 3), Move("shift", 1, 2), Move("norm", 2), Move("gelu")),
    frozen=True,
    waste=False,
)


class Headless(nn.Module):
    """A model without its head: where the blocks make the peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers = model.embedding, model.layers

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    output: torch.Tensor = model(batch.ids)
    return output.float().square().mean()


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "ROUNDS", 1)


def profiled(model: Model) -> Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # times of tiny blocks are noise, which nothing here looks at
        built = Headless(model.build())
        return profile_module(built, WORKLOAD, vocab_size=VOCABULARY, token_points=1, loss=loss)


def actions(view: View, seed: int) -> list[dict[str, Action]]:
    """An action for each unit of each block, any that the unit can have; an input is kept where something needs it."""
    draw = random.Random(seed)
    chosen = [dict(_drawn(view, position, draw)) for position in range(len(view.blocks))]
    for block in chosen:
        # what reads a value that is no unit and cannot come again, or spoils one that has to be exact, is stored
        for unit in block:
            if block[unit] != "store" and not is_recoverable(view, chosen):
                block[unit] = "store"
    for position, block in enumerate(chosen):
        cls = view.class_at(position)
        for unit in {cls.names[unit] for unit in cls.inputs - cls.forced} & block.keys():
            block[unit] = "recompute"
            if not is_recoverable(view, chosen):
                block[unit] = "store"
    return chosen


def is_recoverable(view: View, chosen: Sequence[dict[str, Action]]) -> bool:
    """Whether all that backward needs can be found or rebuilt."""
    try:
        simulate(view, chosen)
    except UnrecoverableError:
        return False
    return True


def _drawn(view: View, position: int, draw: random.Random) -> Iterator[tuple[str, Action]]:
    cls = view.class_at(position)
    for unit in cls.units:
        fitting: list[Action] = ["store", "recompute", *(form.action for form in cls.forms[unit])]
        yield cls.names[unit], "store" if unit in cls.forced | cls.inputs else draw.choice(fitting)


def measured(
    model: Model,
    chosen: Sequence[dict[str, Action]],
    variants: Variants,
    *,
    riskier: bool | None = None,
    begins: GradientState | None = None,
) -> int:
    """The peak of an update under a plan; or under it as the entry of a bucket, with a riskier one above.

    Or, if it is said what that begins with, of its last micro-batch.
    """
    built = Headless(model.build())
    step = ActorStep(built, WORKLOAD, vocab_size=VOCABULARY, device=CPU, loss=loss)
    plan = plans.make_plan(built, chosen)
    if riskier is not None:
        plan = plans.by_exposure(plan, (1.0, 0.0, chosen), (None, 0.0, [{}] * len(chosen)))
    with apply(built, plan) as runtime:
        runtime.variants = variants
        announced = runtime if riskier is None else Announced(runtime, riskier=riskier)
        for _ in range(2):  # the first frames are trials
            step.step(announced)
        return measure_peak(step, announced, last=begins)


@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))  # to make one smaller would take minutes
@given(random_blocks.models(dtypes=(torch.float32, torch.bfloat16), waste=st.just(False)), st.integers(0, 2**16))
@example(RELEASED_LATE, 784)
@example(HELD_IN_FORWARD, 364)
def test_the_simulated_peak_is_the_measured_one(model: Model, seed: int) -> None:
    """To the byte, whatever makes it, but for 8 bytes for each Python number that an op saves past all hooks.

    With casts it may be more: widened copies count from the first value on that is not there as it is.

    The examples were under-predicted once: by kept values that a program read and that stayed until their stage was
    over, and by values that are not kept and yet are there when forward holds most.
    """
    profile, variants = profiled(model), Variants()
    view, first = view_at(profile, WORKLOAD.tokens), view_at(profile, WORKLOAD.tokens, "none")
    for number in range(PLANS):
        chosen = actions(view, seed + number)
        more = simulate(view, chosen).peak_bytes - measured(model, chosen, variants)
        assert more > -ROUNDING
        assert more < ROUNDING or any("cast" in block.values() for block in chosen)
        more = simulate(first, chosen).peak_bytes - measured(model, chosen, variants, begins="none")
        assert more > -ROUNDING, "of a micro-batch that begins without gradients"


@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
@given(random_blocks.models(dtypes=(torch.float32, torch.bfloat16), waste=st.just(False)), st.integers(0, 2**16))
@example(Model((Move("gate"), Move("rms"), Move("gate"))), 3)
def test_what_turns_out_riskier_and_is_rebuilt_exactly_stays_below_the_simulated_peak(model: Model, seed: int) -> None:
    view, variants = view_at(with_codes(profiled(model)), WORKLOAD.tokens), Variants()
    for number in range(PLANS):
        chosen = actions(view, seed + number)
        peak = simulate(view, chosen).peak_bytes
        assert measured(model, chosen, variants, riskier=False) <= peak
        assert measured(model, chosen, variants, riskier=True) <= peak


def with_codes(profile: Profile) -> Profile:
    """The profile with int8 for all that it takes, without a calibration."""
    codec = registry.find("int8")

    def coded(cls: BlockClass, measure: ClassMeasure) -> ClassMeasure:
        dtypes = [getattr(torch, value.dtype) for value in cls.values]
        counts = tuple(
            0 if codec.refuses(torch.empty(0, dtype=dtype)) else codec.bytes_for(count // dtype.itemsize, dtype)
            for dtype, count in zip(dtypes, measure.value_bytes, strict=True)
        )
        return measure.model_copy(
            update={"codec_bytes": {"int8": counts}, "codec_seconds": {"int8": (0.0,) * len(counts)}}
        )

    points = tuple(
        point.model_copy(update={"classes": tuple(map(coded, profile.classes, point.classes))})
        for point in profile.points
    )
    return profile.model_copy(update={"points": points})


class Announced:
    """A runtime whose micro-batches are all said to have no exposure, and turn out riskier or do not."""

    def __init__(self, runtime: Runtime, *, riskier: bool) -> None:
        self.runtime, self.riskier = runtime, riskier

    @contextmanager
    def microbatch(self, *, tokens: int, exposure: float) -> Iterator[Microbatch]:
        with self.runtime.microbatch(tokens=tokens, exposure=0.0) as micro_batch:
            micro_batch.alarm = Alarm()
            micro_batch.alarm.raised = self.riskier
            yield micro_batch
