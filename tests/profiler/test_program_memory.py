"""What a stage's program holds on the way: as the profiler measures it, and against what training takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import strategies
import torch

import hilore_plan
from hilore_plan.bench.workload import build_workload
from hilore_plan.graph.capture import capture
from hilore_plan.graph.recovery_units import block_graph
from hilore_plan.graph.signature import flatten_call
from hilore_plan.planner.timeline import view_at
from hilore_plan.profiler.memory import Segment, Trace
from hilore_plan.profiler.ops import measure_ops
from hilore_plan.profiler.outside import Gradients, Reading
from hilore_plan.profiler.peaks import measure_peak
from hilore_plan.schema.profile import Profile, Value

# only bytes matter here; the times of so small a model are noise
pytestmark = pytest.mark.filterwarnings("ignore::hilore_plan.profiler.recompute_scale.NoisyMeasurementWarning")

SIZES = {"dtype": "float32", "batch": 4, "prompt_tokens": 32, "response_tokens": 96, "token_points": 1}


@pytest.fixture(scope="module")
def lora() -> Profile:
    """LoRA makes much that no backward asks for: products of frozen weights, their low-rank parts, and the sums."""
    return hilore_plan.profile_model("builtin:tiny-llama", lora_rank=4, **SIZES)


@pytest.mark.parametrize("budget", ["1.1x-gc", "1.3x-gc"])
def test_a_plan_for_lora_fits_the_budget_and_is_predicted_closely(lora: Profile, budget: str) -> None:
    plan = hilore_plan.solve_plan(lora, budget=budget, token_buckets=1)
    assert [entry.gradients for entry in plan.entries] == ["none", "live"]
    built = build_workload(lora.workload, "cpu")
    with hilore_plan.apply(built.model, plan) as runtime:
        for _ in range(2):  # the first frames are trials
            built.step.step(runtime)
        for entry in plan.entries:
            peak = measure_peak(built.step, runtime, last=entry.gradients)
            assert peak <= entry.predicted.peak_bytes <= 1.05 * peak


def test_values_are_asked_for_from_the_end_and_backward_holds_little_at_first(lora: Profile) -> None:
    cls = view_at(lora, lora.workload.tokens).classes[0]
    working = lora.points[0].classes[0].stage_working_bytes
    assert len(cls.backward) == cls.stages == 2
    asked = cls.backward[0].requests
    names = [cls.names[request.value] for request in asked]
    assert names[0].startswith("mlp.down_proj")
    assert names.index("mlp.act_fn.silu") < names.index("post_attention_layernorm.rsqrt")
    for stage, most in zip(cls.backward, working, strict=True):
        assert most == max(stage.early_bytes, *(request.peak_bytes for request in stage.requests))
        assert all(request.held_bytes <= request.peak_bytes for request in stage.requests)
    hidden = cls.value_bytes[next(iter(cls.inputs))]
    assert asked[0].held_bytes <= 2 * hidden  # the gradient of the block's output, and little else


def op_working_bytes(block: torch.nn.Module) -> dict[str, int]:
    call = flatten_call((torch.randn(2, 64, 64, requires_grad=True),), {})
    graph = block_graph(capture(block, call))
    measures = measure_ops(graph, block, call)
    return {op.name: count for op, count in zip(graph.ops, measures.op_working_bytes, strict=True)}


class Transposing(torch.nn.Module):
    """Its product cannot read one side as it lies: the kernel copies that first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[:, :, ::2], x[:, ::2]).tanh()


def test_an_ops_working_memory_is_what_it_allocates_beside_its_outputs() -> None:
    working = op_working_bytes(Transposing())
    assert working["bmm"] == 64 * 32 * 4  # one matrix of the batch after the other
    assert working["tanh"] == 0


class Adding(torch.nn.Module):
    """Writes a product of the same kind into a tensor that is there already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().baddbmm_(x[:, :, ::2], x[:, ::2]).tanh()


def test_what_an_op_writes_into_is_no_output_of_its_own() -> None:
    working = op_working_bytes(Adding())
    assert working["baddbmm_"] == 64 * 32 * 4


def test_the_first_request_for_a_value_counts_and_the_most_of_all_blocks() -> None:
    """Two slots of value 1 in stage 0, one of value 0 in stage 1; 8 bytes are stored in stage 1, 24 in stage 0."""
    values = [
        Value(name="early", kind="op", dtype="float32", slot_stages=(1,)),
        Value(name="late", kind="op", dtype="float32", slot_stages=(0, 0)),
    ]
    record = strategies.Graph(values).block_class("Layer", [0, 1], 2)
    found = SimpleNamespace(record=record, slot_stages=[1, 0, 0], slot_values=[0, 1, 1])
    segments = [
        *(Segment("forward:0", 0, 0), Segment("backward:1:0", 90, 95)),
        *(Segment("backward:1:0:2", 50, 80), Segment("backward:1:0:1", 70, 91), Segment("backward:1:1:0", 33, 60)),
        *(Segment("backward:0:0:2", 27, 44), Segment("backward:0:0:1", 99, 99), Segment("backward:0:1:0", 20, 21)),
    ]
    classes: list[Any] = [found]
    reading = Reading(Trace(tuple(segments)), classes, [[8, 16]], 0, Gradients(0, 0, (0, 0)), begins="live")
    late, early = reading.requests(0)
    # beside block 1 there is what block 0 stores, 24 bytes
    assert late.early_bytes == 95 - 24 - 24
    assert late.held_bytes == {1: max(50 - 24 - 24, 27 - 24)}
    assert late.peak_bytes == {1: max(91 - 24 - 24, 99 - 24)}  # a second request for a value goes on from its first
    assert early.early_bytes == 0
    assert early.held_bytes == {0: max(33 - 24 - 8, 20 - 8)}
    assert early.peak_bytes == {0: max(60 - 24 - 8, 21 - 8)}
