"""Faults known from systems that recompute: each a kind that must not happen here, by the name of what goes wrong.

What is tested at length elsewhere (leaks, frames in flight, sharding, autocast, state that forward changes) is not
repeated: see tests/runtime.
"""

from __future__ import annotations

from collections.abc import Callable

import plans
import pytest
import torch
from models import FAMILIES, MODELS, WIDTH, Case, Plain, Stack
from runtime.rig import LLAMA, Attach, assert_bit_equal, assert_plan_is_exact, warm_up
from torch import nn
from torch.nn import functional

from hilore_plan.errors import PlanMismatchError, RefusedError
from hilore_plan.runtime.attach import apply


def case_of(block: Callable[[], nn.Module]) -> Case:
    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Stack(block, 2).to(dtype).train()

    return Case(block.__name__, build)


def test_04_a_fused_kernel_leaves_no_unit_for_what_it_does_not_save(attach: Attach) -> None:
    graph = attach.graphs(LLAMA, LLAMA.build())[0]
    units = [value.name for value in graph.values if value.keepable]
    assert not [name for name in units if "softmax" in name]
    assert all(value.slots for value in graph.values if value.keepable and value.kind == "op")


@pytest.mark.parametrize("name", ["dropout", "gpt2-dropout"])
def test_06_dropout_draws_the_same_numbers_and_no_more(name: str, attach: Attach) -> None:
    """Gradients agree, and so does the state of the generator after each step."""
    case = MODELS[name]
    model, reference = case.build(), case.build()
    attach(model)
    inputs = case.make_inputs(2, 9, seed=0)
    for _ in range(2):
        states = []
        got, want = {}, {}
        for each, gradients in ((model, got), (reference, want)):
            gradients.update(case.gradients(each, inputs))
            states.append(torch.get_rng_state())
        assert_bit_equal(got, want)
        assert torch.equal(*states)


def test_07_a_tensor_that_a_hook_injects_reaches_the_adapters_gradient(attach: Attach) -> None:
    class Adapted(Plain):
        """A low-rank adapter, scaled by a tensor that only a hook knows."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            self.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "scale": torch.cos(args[0].detach().sum(-1))}),
                with_kwargs=True,
            )

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tanh(self.b(self.a(x))) * scale[..., None]

    case = case_of(Adapted)
    model = case.build()
    assert_plan_is_exact(case, attach(model), model)
    assert all(
        parameter.grad.abs().sum() > 0 for layer in model.layers for parameter in (layer.a.weight, layer.b.weight)
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_09_a_router_between_equal_experts_routes_the_same_way_again(family: str, attach: Attach) -> None:
    case = FAMILIES[family]

    def tied() -> nn.Module:
        model = case.build(dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.data[1:] = parameter.data[:1]  # every token is a tie
        return model

    model = tied()
    assert_plan_is_exact(case, attach(model), model, tied())


def test_11_an_add_in_place_onto_a_layers_output_does_not_spoil_what_was_saved(attach: Attach) -> None:
    class Added(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))
            h += 0.5 * torch.sigmoid(h.detach())
            out = self.down(functional.gelu(h))
            out += x
            return out

    case = case_of(Added)
    for choice in (None, plans.store, plans.seeded(1)):
        model = case.build()
        runtime = attach(model) if choice is None else attach.chosen(case, choice, model)
        assert_plan_is_exact(case, runtime, model)
        runtime.detach()


@pytest.mark.parametrize("name", ["square", "views", "tied"])
@pytest.mark.parametrize("choice", [plans.store, plans.seeded(6)], ids=["store", "mixed"])
def test_15_views_that_share_an_address_are_not_mixed_up(name: str, choice: plans.Choose, attach: Attach) -> None:
    case = MODELS[name]
    model = case.build(dtype=torch.bfloat16)
    assert_plan_is_exact(case, attach.chosen(case, choice, model), model, steps=3)


def test_24_a_plan_made_with_other_trainable_parameters_is_refused() -> None:
    plan = plans.make_plan(LLAMA.build())
    model = LLAMA.build()
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(PlanMismatchError, match=r"mlp\.up_proj\.weight of model\.layers\.1 is .* trainable, here"):
        apply(model, plan)


def test_24_a_plan_made_for_another_attention_kernel_is_refused(attach: Attach) -> None:
    eager = LLAMA.build(attention="eager")
    runtime = attach(eager)
    warm_up(LLAMA, eager)
    runtime.detach()
    model = LLAMA.build()
    attach(model, plans.make_plan(model, plans.choose(plans.graphs_of(runtime), plans.store)))
    with pytest.raises(PlanMismatchError, match=r"units that model\.layers\.0 does not have(?s:.*)attention kernel"):
        model(**LLAMA.make_inputs(2, 9, seed=0))


def test_23_torch_compile_around_a_planned_block_is_refused_and_never_passes_the_plan_over(attach: Attach) -> None:
    """Hooks on saved tensors and a compiler do not mix: hooks would be skipped, or all unpacked at once."""
    case = MODELS["plain"]
    model = case.build()
    runtime = attach(model)
    inputs = case.make_inputs(2, 9, seed=0)
    with pytest.raises(RefusedError, match="compile"):
        torch.compile(model, backend="eager")(**inputs)
    torch._dynamo.reset()
    assert_plan_is_exact(case, runtime, model)
