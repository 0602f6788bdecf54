"""Kernels that differ from what was captured: chosen otherwise, laid out otherwise, or with results nobody wrote."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from models import WIDTH, Plain, Stack
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, no_warnings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

from hilore_plan.graph.capture import capture
from hilore_plan.graph.randomness import is_left_over
from hilore_plan.graph.recovery_units import block_graph
from hilore_plan.graph.signature import flatten_call
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.recipe import Recipe
from hilore_plan.runtime.variants import Variants


def test_a_kernel_of_attention_that_is_chosen_later_has_a_graph_of_its_own(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = attach(model)
    runtime.variants = Variants()  # of its own, to count what is captured here
    inputs = LLAMA.make_inputs(2, 9, seed=0)
    for backend in (None, SDPBackend.MATH, None, SDPBackend.MATH):
        with sdpa_kernel(backend if backend is not None else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))
    report = runtime.report()
    assert report.captures == 2
    assert not report.fallbacks


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return turned(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad


@torch.library.custom_op("hilore_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """A copy with its last two dimensions the other way round in memory."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # and says otherwise


class Turning(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(_Turned.apply(self.up(self.norm(x)))))


def test_a_kernel_that_lays_its_result_out_otherwise_than_it_says_is_checkpointed(attach: Attach) -> None:
    model, reference = (_stack(Turning) for _ in "12")
    runtime = attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    with pytest.warns(HiloreWarning, match="laid out by strides") as caught:
        got = [PLAIN.gradients(model, inputs) for _ in range(3)]
    want = PLAIN.gradients(reference, inputs)
    for each in got:
        assert_bit_equal(each, want)
    assert len(caught) == 1
    assert set(runtime.report().fallbacks) == {"layers.0"}


_numbers = itertools.count()


@torch.library.custom_op("hilore_tests::scaled_dot_product_stand_in", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Like fused attention on CUDA: a result, and a state that is whatever was in that memory."""
    return torch.sin(x), torch.tensor(next(_numbers))


@attention.register_fake
def _(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty((), dtype=torch.long)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        out, state = attention(x, 0.0)
        ctx.save_for_backward(x, out, state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, out, _ = ctx.saved_tensors
        return grad * torch.cos(x) * (1 + 0 * out)


class Attending(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(_Attention.apply(self.up(self.norm(x))))


def test_a_random_state_that_nothing_drew_from_need_not_come_back(attach: Attach) -> None:
    model, reference = (_stack(Attending) for _ in "12")
    runtime = attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    with no_warnings():
        for _ in range(2):
            assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))
    assert runtime.report().programs_run > 0
    assert not runtime.report().stored_instead


@pytest.mark.parametrize(("dropout", "left"), [(0.0, {6, 7}), (0.1, set())])
def test_the_left_over_states_of_flash_attention_on_cuda(dropout: float, left: set[int]) -> None:
    """On tensors that only say that they are on CUDA."""

    def run(q: torch.Tensor) -> list[Any]:
        found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, q, q, dropout, True)
        return [each for each in found if torch.is_tensor(each)]

    with FakeTensorMode(shape_env=ShapeEnv()):
        q = torch.empty(2, 4, 16, 32, dtype=torch.bfloat16, device="cuda")
    graph = make_fx(run, tracing_mode="symbolic")(q).graph
    outputs = {node.args[1]: node for node in graph.nodes if node.target is operator.getitem}
    assert {index for index, node in outputs.items() if is_left_over(node)} == left
    assert {0, 1, 6, 7} <= set(outputs)


def on_cuda(q: torch.Tensor, kernel: str) -> torch.Tensor:
    """The op that fused attention becomes on CUDA."""
    aten: Any = torch.ops.aten
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)[0]
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, True)[0]
    return aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)[0]


class OnCuda(Plain):
    """A block that runs on CUDA only, and can be captured anywhere: capturing computes nothing."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = on_cuda(q, self.kernel).transpose(1, 2).flatten(2)
        return x + self.down(torch.sigmoid(self.up(self.norm(mixed))))


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_every_kernel_of_attention_on_cuda_has_a_graph(kernel: str) -> None:
    block = OnCuda(kernel).to(torch.bfloat16)
    call = flatten_call((torch.zeros(2, 9, WIDTH, dtype=torch.bfloat16, requires_grad=True),), {})
    graph = block_graph(capture(block, call))
    names = {value.name for value in graph.values if value.slots}
    assert {"sdpa.out", "sdpa.lse"} <= names
    recipe = Recipe(graph, {})
    kept = {graph.values[index].name for index in recipe.kept}
    assert kept - {"input.x"} == {name for name in names if name.startswith("sdpa.")} - {"sdpa.out", "sdpa.lse"}
    geometry = recipe.layout((torch.Size([2, 37, WIDTH]),)).slots  # one graph for all lengths
    lse = next(slot for slot, each in enumerate(graph.slots) if graph.values[each.value].name == "sdpa.lse")
    assert geometry[lse][0][:3] == (2, 2, 64 if kernel == "efficient" else 37)


def _stack(block: type[Plain]) -> Stack:
    torch.manual_seed(0)
    return Stack(block, depth=1)
