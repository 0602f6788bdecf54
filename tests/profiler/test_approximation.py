"""What backward sees with units compressed: exact with a codec that loses nothing, and complete with one that does."""

from __future__ import annotations

import pytest
import torch
from models import FAMILIES, MODELS
from torch import nn

from hilore_plan.codecs.registry import find
from hilore_plan.graph.blocks import find_blocks
from hilore_plan.integrations.builtin_models import build
from hilore_plan.profiler.approximation import Approximation, following
from hilore_plan.profiler.calibrated import CalibratedClass, Pair
from hilore_plan.profiler.calls import record_calls
from hilore_plan.profiler.classes import CapturedClass, find_classes
from hilore_plan.profiler.formats import taken
from hilore_plan.profiler.fp32 import in_fp32
from hilore_plan.profiler.tape import Tape, taped

INT4 = find("int4")


class Lossless:
    """A codec that gives back what it was given."""

    name = "lossless"

    def refuses(self, tensor: torch.Tensor) -> str | None:
        return None

    def bytes_for(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode_flat(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (flat.clone(),)

    def decode_flat(self, parts: tuple[torch.Tensor, ...], elements: int, dtype: torch.dtype) -> torch.Tensor:
        return parts[0].clone()


def captured(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[list[nn.Module], list[CalibratedClass]]:
    blocks = [block for _, block in find_blocks(model)]
    found = find_classes(blocks, record_calls(blocks, lambda: model(**inputs)))
    return blocks, [CalibratedClass(c) for c in found if isinstance(c, CapturedClass)]


@pytest.mark.parametrize("name", ["llama", "gpt2-dropout", "gemma3", "in_place", "views", "tuple"])
def test_a_codec_that_loses_nothing_changes_no_slot(name: str) -> None:
    case = MODELS[name]
    model = case.build(torch.float32, seed=0)
    inputs = case.make_inputs(2, 12, seed=1)
    blocks, classes = captured(model, inputs)
    with taped(blocks, distinct_casts=False) as tapes:
        case.loss(model, inputs)
        for found in classes:
            first = found.found.first
            graph = found.graph_of(blocks[first], tapes[first])
            for unit in found.units(graph):
                replaced = found.replaced(blocks[first], tapes[first], [Pair(unit, Lossless())])
                assert set(graph.values[graph.index[unit]].slots) <= set(replaced)
                wrong = [slot for slot, t in replaced.items() if not torch.equal(tapes[first].slots[slot], t)]
                assert not wrong, f"{unit}: slots {wrong}"


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt_neox"])
def test_a_block_of_a_bf16_model_saves_the_same_tensors_in_fp32(family: str) -> None:
    case = FAMILIES[family]
    model = case.build(torch.bfloat16, seed=0)
    inputs = case.make_inputs(2, 12, seed=1)
    blocks, classes = captured(model, inputs)
    with in_fp32(model) as narrow, taped(blocks, distinct_casts=narrow) as tapes:
        case.loss(model, inputs)
        for found in classes:
            first = found.found.first
            graph = found.graph_of(blocks[first], tapes[first])
            assert len(graph.slots) == len(found.found.graph.slots) == len(tapes[first].slots)
            assert set(taken(found.found.graph, found.found.record, INT4)) <= {
                found.found.graph.index[unit] for unit in found.units(graph)
            }


def llama_tape() -> tuple[nn.Module, CalibratedClass, Tape]:
    model = build("builtin:tiny-llama", dtype="float32").model
    inputs = {"input_ids": torch.arange(24).view(2, 12)}
    blocks, (found,) = captured(model, inputs)
    with taped(blocks, distinct_casts=False) as tapes:
        model(**inputs)
        tape = Tape(tapes[0].forward)
        tape.slots, tape.call = tapes[0].slots, tapes[0].call
    return blocks[0], found, tape


@pytest.mark.parametrize(("unit", "rebuilt"), [("add", True), ("add.2", True), ("v_proj", False), ("sdpa.out", False)])
def test_attention_is_rebuilt_as_a_whole(unit: str, rebuilt: bool) -> None:
    block, found, tape = llama_tape()
    graph = found.graph_of(block, tape)
    replaced = found.replaced(block, tape, [Pair(f"self_attn.{unit}", INT4)])
    lse = graph.values[graph.index["self_attn.sdpa.lse"]].slots
    assert (set(lse) <= set(replaced)) == rebuilt


def test_the_errors_of_v_and_of_attentions_output_are_independent() -> None:
    """Their squares add up: v is tested beside the output that plans keep."""
    block, found, tape = llama_tape()
    graph = found.graph_of(block, tape)
    v = set(graph.values[graph.index["self_attn.v_proj"]].slots)
    replaced = set(found.replaced(block, tape, [Pair("self_attn.v_proj", INT4)]))
    assert replaced == v
    out = set(graph.values[graph.index["self_attn.sdpa.out"]].slots)
    both = found.replaced(block, tape, [Pair("self_attn.v_proj", INT4), Pair("self_attn.sdpa.out", INT4)])
    alone = found.replaced(block, tape, [Pair("self_attn.sdpa.out", INT4)])
    assert all(torch.equal(both[slot], alone[slot]) for slot in out)


def test_errors_add_up_but_for_v_beside_an_inexact_q() -> None:
    _, found, _ = llama_tape()
    assert found.add_up(["self_attn.v_proj", "self_attn.sdpa.out", "mlp.up_proj"])
    assert found.add_up(["self_attn.add", "self_attn.add.2", "input_layernorm.mul.2"])
    assert not found.add_up(["mlp.up_proj", "self_attn.v_proj", "self_attn.add"])
    assert not found.add_up(["input_layernorm.mul.2", "self_attn.v_proj"])


def test_units_are_apart_unless_one_is_computed_from_another() -> None:
    _, found, _ = llama_tape()
    assert found.apart(["self_attn.add", "self_attn.add.2", "self_attn.v_proj"])
    assert found.apart(["mlp.up_proj", "mlp.gate_proj"])
    assert not found.apart(["mlp.mul", "mlp.up_proj"])
    assert not found.apart(["input_layernorm.mul.2", "mlp.up_proj"])


def test_attention_rebuilt_from_approximate_q_belongs_to_it() -> None:
    block, found, tape = llama_tape()
    graph = found.graph_of(block, tape)
    replaced = found.replaced(block, tape, [Pair("self_attn.add", INT4)])

    def slot(name: str) -> int:
        return graph.values[graph.index[f"self_attn.{name}"]].slots[0]

    q, k = replaced[slot("add")], tape.slots[slot("add.2")]
    scores = q @ k.transpose(-1, -2).repeat_interleave(q.shape[1] // k.shape[1], 1) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    expected = scores.masked_fill(future, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(replaced[slot("sdpa.lse")], expected)


def test_what_is_compressed_itself_is_not_rebuilt_from_others() -> None:
    block, found, tape = llama_tape()
    graph = found.graph_of(block, tape)
    both = found.replaced(block, tape, [Pair("input_layernorm.mul.2", INT4), Pair("mlp.up_proj", INT4)])
    alone = found.replaced(block, tape, [Pair("mlp.up_proj", INT4)])
    (slot,) = graph.values[graph.index["mlp.up_proj"]].slots
    assert torch.equal(both[slot], alone[slot])


def test_what_follows_a_value() -> None:
    _, found, _ = llama_tape()
    graph = found.found.graph
    names = {graph.values[i].name for i in following(graph, frozenset({graph.index["mlp.gate_proj"]}))}
    assert names == {"mlp.gate_proj", "mlp.act_fn.silu", "mlp.mul", "mlp.down_proj", "add.2"}


def test_a_random_op_below_a_compressed_value_does_not_run_again() -> None:
    case = FAMILIES["gpt2-dropout"]
    model, inputs = case.build(seed=0), case.make_inputs(2, 12, seed=1)
    _, (found,) = captured(model, inputs)
    graph = found.found.graph
    for place in taken(graph, found.found.record, INT4):
        made = Approximation(graph, frozenset({place}))
        ran = {name for program in made.programs for name in program.ops}
        assert not ran & {op.name for op in graph.ops if not op.recomputable}


@pytest.mark.parametrize("distinct_casts", [False, True])
def test_tapes_change_no_gradient_and_leave_nothing(distinct_casts: bool) -> None:
    case = FAMILIES["qwen3"]
    model, inputs = case.build(seed=0), case.make_inputs(2, 12, seed=1)
    expected = case.gradients(model, inputs)
    blocks = [block for _, block in find_blocks(model)]
    before = [dict(vars(block)) for block in blocks]
    with taped(blocks, distinct_casts=distinct_casts) as tapes:
        found = case.gradients(model, inputs)
        assert all(tape.slots and tape.outputs and tape.inputs for tape in tapes)
    if distinct_casts:  # one more copy, and gradients add up in another order
        torch.testing.assert_close(found, expected)
    else:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [dict(vars(block)) for block in blocks] == before
    assert not any(tape.slots or tape.outputs for tape in tapes)
