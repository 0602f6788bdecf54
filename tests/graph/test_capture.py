"""What a captured block says: slots and their values, names, guards, hashes; and the programs that rebuild."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from models import FAMILIES, Buffered, Custom, Dropout, InPlace, Plain, Square, Tied, Views
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from hilore_plan.errors import CaptureError
from hilore_plan.graph.blocks import find_blocks
from hilore_plan.graph.capture import capture
from hilore_plan.graph.fingerprint import graph_hash
from hilore_plan.graph.program import recovery_programs, unrecoverable
from hilore_plan.graph.recovery_units import BlockGraph, block_graph
from hilore_plan.graph.signature import Call, flatten_call

TESTS = Path(__file__).parents[1]
HAND_WRITTEN = (Plain, InPlace, Dropout, Tied, Square, Views, Buffered, Custom)
MATMULS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def call_of(name: str, batch: int = 2, length: int = 9, **overrides: object) -> tuple[nn.Module, Call]:
    """The first block of a family, and the call that its model makes of it."""
    model = FAMILIES[name].build(**overrides)
    block = find_blocks(model)[0][1]
    calls: list[Call] = []
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(flatten_call(args, kwargs)), with_kwargs=True
    )
    model(**FAMILIES[name].make_inputs(batch, length, seed=0))
    hook.remove()
    return block, calls[0]


@cache
def graph_of(name: str, batch: int = 2, length: int = 9) -> BlockGraph:
    return block_graph(capture(*call_of(name, batch, length)))


def own_graph(block: type[nn.Module], batch: int = 2, length: int = 9) -> BlockGraph:
    torch.manual_seed(0)
    x = torch.randn(batch, length, 32, requires_grad=True)
    return block_graph(capture(block().train(), flatten_call((x,), {})))


@pytest.mark.parametrize("block", HAND_WRITTEN)
def test_each_slot_is_the_node_that_autograd_saves(block: type[nn.Module]) -> None:
    """Run the graph beside the block: slot by slot the same tensors, bit for bit."""
    torch.manual_seed(0)
    module, x = block().train(), torch.randn(2, 9, 32, requires_grad=True)
    call = flatten_call((x,), {})
    graph = block_graph(capture(module, call))
    state = {name: tensor.clone() for name, tensor in module.named_buffers()}
    saved: list[torch.Tensor] = []
    torch.manual_seed(1)
    with saved_tensors_hooks(lambda t: (saved.append(t.detach().clone()), t)[1], lambda t: t):
        module(x)
    for name, tensor in module.named_buffers():
        tensor.copy_(state[name])
    torch.manual_seed(1)
    with torch.no_grad():
        results = torch.fx.Interpreter(graph.capture.module).run(*graph.capture.placeholder_values(module, call))
    assert len(saved) == len(graph.slots)
    for mine, theirs in zip(results[-len(saved) :], saved, strict=True):
        assert torch.equal(mine, theirs)


def test_capturing_changes_nothing_of_the_block() -> None:
    torch.manual_seed(0)
    block = Buffered().train()
    call = flatten_call((torch.randn(2, 9, 32, requires_grad=True),), {})
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    attributes, seed = dict(vars(block)), torch.get_rng_state()
    capture(block, call)
    assert vars(block).keys() == attributes.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in block.parameters())


def test_units_have_readable_names() -> None:
    units = {value.name for value in graph_of("llama").values if value.keepable}
    assert units >= {"self_attn.sdpa.out", "self_attn.sdpa.lse", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn.silu"}
    assert len(units) == sum(value.keepable for value in graph_of("llama").values)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_names_and_hash_are_the_same_at_every_size(name: str) -> None:
    first = graph_of(name)
    for batch, length in ((3, 9), (2, 30)):
        other = graph_of(name, batch, length)
        assert [value.name for value in other.values] == [value.name for value in first.values]
        assert graph_hash(other) == graph_hash(first)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_below_and_beyond_a_sliding_window_the_graph_fits_or_is_another(name: str) -> None:
    """The windows of these models are 8 tokens long."""
    beyond, below = graph_of(name), graph_of(name, length=5)
    fits = beyond.capture.fits(call_of(name, length=5)[1].tensors)
    assert fits == (graph_hash(beyond) == graph_hash(below))
    assert beyond.capture.fits(call_of(name, length=30)[1].tensors)


def test_the_hash_tells_models_apart() -> None:
    graphs = [graph_of(name) for name in ("llama", "qwen2", "qwen3", "gpt2", "gemma3")]
    eager = block_graph(capture(*call_of("llama", attention="eager")))
    wider = block_graph(capture(*call_of("llama", num_key_value_heads=4)))
    hashes = [graph_hash(graph) for graph in (*graphs, eager, wider)]
    assert len(set(hashes)) == len(hashes)


def test_names_and_hash_are_the_same_in_another_process() -> None:
    program = (
        "from graph.test_capture import graph_of, graph_hash\n"
        "g = graph_of('llama', 3, 14)\n"
        "print(graph_hash(g), ' '.join(v.name for v in g.values))"
    )
    path = os.pathsep.join([str(TESTS), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    graph = graph_of("llama")
    assert result.stdout.split() == [graph_hash(graph), *(value.name for value in graph.values)]


def test_a_graph_serves_every_size_that_its_guards_allow() -> None:
    graph = graph_of("llama")
    for batch, length in ((2, 30), (3, 9), (5, 17)):
        assert graph.capture.fits(call_of("llama", batch, length)[1].tensors)


def test_a_size_that_takes_another_way_does_not_fit() -> None:
    class ByLength(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.shape[1] > 8 else torch.tanh(super().forward(x))

    graph = own_graph(ByLength)
    assert graph.capture.guards
    assert graph.capture.fits((torch.empty(4, 30, 32),))
    assert not graph.capture.fits((torch.empty(4, 8, 32),))
    assert graph_hash(graph) != graph_hash(own_graph(ByLength, length=8))


def test_two_sizes_that_happen_to_agree_are_not_taken_for_one() -> None:
    graph = own_graph(Plain, batch=9, length=9)
    assert graph.capture.fits((torch.empty(2, 30, 32),))


def test_a_branch_on_data_is_refused_with_a_reason() -> None:
    class Branches(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else super().forward(x)

    with pytest.raises(CaptureError, match=r"Branches: .*data-dependent"):
        own_graph(Branches)


def test_slots_that_are_views_of_one_storage_are_one_value() -> None:
    class Parts(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))
            one, two = h.split(32, dim=-1)
            wide = torch.tanh(x.mean(1, keepdim=True)).expand_as(x)
            return one.sin() * two.cos() + wide * x

    graph = own_graph(Parts)
    by_name = {value.name: value for value in graph.values}
    assert len(by_name["up"].slots) == 2  # what sin and cos save
    assert "block.split" not in by_name
    expanded = by_name["tanh"]
    assert expanded.fake.shape[1] == 1
    assert len(expanded.slots) == 2  # as tanh's own result, and expanded


def test_what_is_written_in_place_is_not_narrowed_and_keeps_one_storage() -> None:
    graph = own_graph(InPlace)
    written = [value for value in graph.values if value.node in graph.written.values()]
    assert written
    assert not any(value.narrow for value in written)
    for node in graph.written:
        assert graph.value_of[node] == graph.value_of[graph.seen_as(node)]
    assert all(not op.recomputable for op in graph.ops if op.node in graph.written)


def test_an_output_of_several_that_is_written_into_does_not_come_from_its_op_again() -> None:
    class Renormalised(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))
            top, places = torch.softmax(h, -1).topk(4, dim=-1)
            top /= top.sum(-1, keepdim=True)
            return x + h.gather(-1, places).sum(-1, keepdim=True) * (top.exp() * top).sum(-1, keepdim=True)

    graph = own_graph(Renormalised)
    topk = next(op for op in graph.ops if op.name.endswith("topk"))
    assert not topk.recomputable


def test_what_dropout_draws_is_kept() -> None:
    graph = own_graph(Dropout)
    inputs = {i for i, value in enumerate(graph.values) if value.kind == "input"}
    lost = {graph.values[value].name for value in unrecoverable(graph, inputs)}
    assert lost
    assert all("inner" in name or "outer" in name or "down" in name or "tanh" in name for name in lost)


def kept(graph: BlockGraph, *units: str) -> set[int]:
    """The arguments, and the units whose name ends so."""
    return {
        i for i, value in enumerate(graph.values) if value.kind == "input" or (units and value.name.endswith(units))
    }


def test_with_matmul_outputs_kept_only_elementwise_ops_run() -> None:
    graph = graph_of("llama")
    attention = ("sdpa.out", "sdpa.lse", "self_attn.add", "self_attn.add.2")
    ops = [
        op for program in recovery_programs(graph, kept(graph, *MATMULS, *attention)) if program for op in program.ops
    ]
    targets = {op.name: str(op.node.target) for op in graph.ops}
    assert ops
    assert not [op for op in ops if "mm" in targets[op] or "attention" in targets[op]]
    assert "mlp.act_fn.silu" in ops


def test_a_program_runs_each_op_once_and_none_that_is_not_needed() -> None:
    graph = graph_of("llama")
    programs = [program for program in recovery_programs(graph, kept(graph)) if program]
    ops = [op for program in programs for op in program.ops]
    assert len(ops) == len(set(ops))
    assert "mlp.down_proj" not in ops  # no slot needs the block's output


def test_with_everything_kept_nothing_runs() -> None:
    graph = graph_of("llama")
    everything = kept(graph) | {slot.value for slot in graph.slots}
    assert recovery_programs(graph, everything) == (None, None)


def test_a_full_rebuild_costs_the_forward_but_for_the_last_matmul() -> None:
    block, call = call_of("llama")
    graph = block_graph(capture(block, call))
    args, kwargs = call.rebuild(call.tensors)
    with FlopCounterMode(display=False) as forward:
        block(*args, **kwargs)
    values = dict(enumerate(graph.capture.placeholder_values(block, call)))
    shapes = tuple(tensor.shape for tensor in call.tensors)
    carried: dict[int, torch.Tensor] = {}
    with FlopCounterMode(display=False) as rebuild, torch.no_grad():
        for program in recovery_programs(graph, kept(graph)):
            assert program is not None
            state = [values[i] for i in program.state]
            sources = [call.tensors[graph.values[i].place or 0] for i in program.sources]
            results = program.run(*program.sizes(shapes), *state, *sources, *(carried[i] for i in program.carried))
            carried = dict(zip(program.carries, results[len(program.slots) :], strict=True))
    tokens = call.tensors[0].shape[0] * call.tensors[0].shape[1]
    down = 2 * tokens * block.mlp.down_proj.weight.numel()
    assert rebuild.get_total_flops() == forward.get_total_flops() - down
