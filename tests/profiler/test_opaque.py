"""Blocks that cannot be captured: profiled as a whole, planned as the runtime treats them, and predicted so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import tolerances
import torch
from models import VOCABULARY, WIDTH, Plain
from runtime.rig import assert_bit_equal
from torch import nn
from torch.nn import functional

from hilore_plan.cli import rows
from hilore_plan.planner.plan import solve_plan
from hilore_plan.profiler import profile as profile_file
from hilore_plan.profiler.calls import record_calls
from hilore_plan.profiler.classes import find_classes
from hilore_plan.profiler.opaque import OpaqueClass, UncapturedWarning
from hilore_plan.profiler.peaks import measure_peak
from hilore_plan.profiler.profile import profile_module
from hilore_plan.profiler.step import ActorStep, MicroBatch
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.schema.io import load_profile, save
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Workload

CPU = torch.device("cpu")
HIDDEN = 4 * 128 * WIDTH * 4  # bytes of the hidden states: batch, length, width, float32
WORKLOAD = Workload(
    source="builtin:none",
    dtype="float32",
    attention="sdpa",
    head="full",
    batch=4,
    prompt_tokens=28,
    response_tokens=100,
)
pytestmark = pytest.mark.filterwarnings("ignore::hilore_plan.profiler.recompute_scale.NoisyMeasurementWarning")


class Block(Plain):
    """Goes one `way`: plain, branching by its data, or counting its calls as well; `writes` into its input first."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.branches = way != "plain"
        self.counts = way == "counts"
        self.writes = way == "writes"
        self.calls = 0

    def forward(self, x: torch.Tensor, extra: object = None) -> torch.Tensor:
        if self.writes:
            x = x.mul_(1.0)
        h = functional.gelu(self.up(self.norm(x)))
        if self.branches and h.sum().item() > 0:
            h = torch.tanh(h)
        if self.counts:
            self.calls += 1
        return x + self.down(h)


class Light(nn.Module):
    """Blocks without a head: where the activations make the peak."""

    def __init__(self, ways: Sequence[str], extra: object = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(way) for way in ways)
        self.extra = extra

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden) if self.extra is None else layer(hidden, extra=self.extra)
        return hidden


def light(*ways: str, extra: object = None) -> Light:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Light(ways, extra).train()


def loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    return model(batch.ids).square().mean()


def step_of(model: nn.Module) -> ActorStep:
    return ActorStep(model, WORKLOAD, vocab_size=VOCABULARY, device=CPU, loss=loss)


def profiled(model: nn.Module) -> Profile:
    return profile_module(model, WORKLOAD, vocab_size=VOCABULARY, token_points=1, loss=loss)


def profiled_quietly(model: nn.Module) -> Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncapturedWarning)
        return profiled(model)


@contextmanager
def falling_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiloreWarning)
        yield


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "ROUNDS", 1)


def test_a_profile_names_the_block_and_the_reason_once(tmp_path: Path) -> None:
    with pytest.warns(UncapturedWarning) as caught:
        profile = profiled(light("plain", "branches", "plain"))
    (text,) = [str(warning.message) for warning in caught if warning.category is UncapturedWarning]
    assert text.startswith("hilore: block layers.1: cannot be captured (")
    assert "data-dependent" in text
    assert text.endswith("): checkpointed")
    usual, whole = profile.classes
    assert (usual.blocks, usual.uncaptured) == ((0, 2), None)
    assert whole.blocks == (1,)
    assert "data-dependent" in (whole.uncaptured or "")
    save(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


def test_many_blocks_alike_are_one_class_with_one_warning() -> None:
    with pytest.warns(UncapturedWarning) as caught:
        profile = profiled(light(*["branches"] * 5))
    (text,) = [str(warning.message) for warning in caught if warning.category is UncapturedWarning]
    assert "blocks layers.0, layers.1, layers.2 and 2 more: cannot be captured" in text
    assert [c.blocks for c in profile.classes] == [(0, 1, 2, 3, 4)]


def test_a_class_without_a_graph_has_one_op_and_what_it_saves() -> None:
    profile = profiled_quietly(light("plain", "branches"))
    whole, measure = profile.classes[1], profile.points[0].classes[1]
    assert [(value.name, value.kind, value.slot_stages, value.keepable) for value in whole.values] == [
        ("input.x", "input", (0,), True),
        ("norm.weight", "parameter", (), False),
        ("norm.bias", "parameter", (), False),
        ("up.weight", "parameter", (), False),
        ("up.bias", "parameter", (), False),
        ("down.weight", "parameter", (), False),
        ("down.bias", "parameter", (), False),
        ("forward.saved", "op", (0,), False),
    ]
    (op,) = whole.ops
    assert (op.name, op.inputs, op.outputs, op.recomputable) == ("forward", tuple(range(7)), (7,), True)
    # the norm's output with a mean and a deviation per token, what gelu reads, and what tanh gives
    assert measure.value_bytes[0] == HIDDEN
    assert measure.value_bytes[-1] == HIDDEN + 2 * HIDDEN // WIDTH + 2 * HIDDEN + 2 * HIDDEN
    assert measure.op_seconds[0] > 0


def test_a_block_that_counts_its_calls_is_to_be_stored() -> None:
    with pytest.warns(UncapturedWarning, match="stored, as its forward changes its own state"):
        profile = profiled(light("plain", "counts"))
    assert not profile.classes[1].ops[0].recomputable


@pytest.mark.filterwarnings("ignore::hilore_plan.profiler.opaque.UncapturedWarning")
def test_a_block_that_writes_into_its_input_is_to_be_stored() -> None:
    """It also shows that what is measured is no leaf, which could not be written into."""
    model = light("plain", "writes")
    blocks = list(model.layers)
    step = step_of(model)
    found = find_classes(blocks, record_calls(blocks, lambda: step.loss(model, step.batches[0])))[1]
    assert isinstance(found, OpaqueClass)
    assert not found.checkpointed


def test_an_argument_that_no_graph_can_have() -> None:
    model = light("plain", "plain", extra=object())
    with pytest.warns(UncapturedWarning, match="type object cannot be part of a graph"):
        profile = profiled(model)
    assert [c.blocks for c in profile.classes] == [(0, 1)]


def test_measuring_draws_no_random_numbers_and_leaves_nothing_behind() -> None:
    model = light("branches", "branches")
    step = step_of(model)
    blocks = list(model.layers)
    calls = record_calls(blocks, lambda: step.loss(model, step.batches[0]))
    before = [dict(vars(module)) for module in model.modules()], torch.get_rng_state()
    (found,) = find_classes(blocks, calls)
    found.measure(blocks[0], calls[0])
    assert [dict(vars(module)) for module in model.modules()] == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for parameter in model.parameters())


WAYS = {
    "in the middle": ("plain", "branches", "plain", "plain"),
    "last": ("plain", "plain", "plain", "branches"),
    "all": ("branches",) * 4,
    "stored": ("plain", "counts", "plain", "plain"),
    "both": ("counts", "branches", "plain", "branches"),
}


@pytest.mark.parametrize("budget", ["0.75x-store", "0.9x-store", "2x-store"])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_the_predicted_peak_of_a_plan_is_the_measured_one(ways: tuple[str, ...], budget: str) -> None:
    plan = solve_plan(profiled_quietly(light(*ways)), budget=budget, token_buckets=1)
    entry = plan.entries[-1]
    measured = measured_peak(light(*ways), plan)
    assert abs(measured - entry.predicted.peak_bytes) <= tolerances.PREDICTED_PEAK * measured


def measured_peak(model: nn.Module, plan: Plan) -> int:
    step = step_of(model)
    with falling_back(), apply(model, plan) as runtime:
        for _ in range(2):  # first frames are trials, and a fallback's first run stores
            step.step(runtime)
        assert set(runtime.report().fallbacks) == {
            name for kind in plan.classes if kind.uncaptured for name in (plan.block_names[b] for b in kind.blocks)
        }
        return measure_peak(step, runtime)


def test_more_room_goes_to_the_other_blocks() -> None:
    profile = profiled_quietly(light(*WAYS["in the middle"]))
    plans = [solve_plan(profile, budget=budget, token_buckets=1) for budget in ("0.6x-store", "2x-store")]
    assert plans[1].solver.gap == 0
    tight, free = (plan.entries[-1] for plan in plans)
    seconds = profile.points[-1].classes[1].op_seconds[0] * profile.points[-1].recompute_scale
    assert free.predicted.recompute_seconds == pytest.approx(WORKLOAD.micro_batches * seconds)
    assert tight.predicted.recompute_seconds > free.predicted.recompute_seconds
    for entry in (tight, free):
        (whole,) = [group for group in entry.groups if group.blocks == (1,)]
        assert whole.actions == {"input.x": "store"}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_gradients_under_the_plan_are_bit_equal(ways: tuple[str, ...]) -> None:
    model, reference = light(*ways), light(*ways)
    plan = solve_plan(profiled_quietly(light(*ways)), budget="0.75x-store", token_buckets=1)
    with falling_back(), apply(model, plan):
        for _ in range(2):
            assert_bit_equal(gradients(model), gradients(reference))


def test_a_plan_for_blocks_without_a_graph_runs_where_they_have_one() -> None:
    """The same parameters, other code: the graph's inputs may be called otherwise than the call's were."""
    plan = solve_plan(profiled_quietly(light("branches", "branches")), budget="0.9x-store", token_buckets=1)
    kinds = tuple(group.model_copy(update={"actions": {"input.other": "store"}}) for group in plan.entries[0].groups)
    entry = plan.entries[0].model_copy(update={"groups": kinds})
    model, reference = light("plain", "plain"), light("plain", "plain")
    with apply(model, plan.model_copy(update={"entries": (entry,)})) as runtime:
        assert_bit_equal(gradients(model), gradients(reference))
        assert runtime.report().frames == 2
        assert not runtime.report().fallbacks


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss(model, step_of(model).batches[0]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_tables_say_what_becomes_of_it() -> None:
    profile = profiled_quietly(light("plain", "branches", "counts"))
    usual, whole, counting = (rows.profile_units(profile, number) for number in range(3))
    assert not any("cannot be captured" in note for note in usual.notes)
    assert "data-dependent" in whole.notes[-1]
    assert "each block is checkpointed: " in whole.notes[-1]
    assert "each block is stored, " in counting.notes[-1]
    plan = solve_plan(profile, budget="2x-store", token_buckets=1)
    tables = rows.plan_units(plan, plan.entries[-1], profile)
    assert ["cannot be captured" in table.notes[-1] for table in tables] == [False, True, True]
