"""What else happens around training: generation, evaluation, autocast, checkpointing switched on again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import plans
import pytest
import torch
from models import Case, Plain, Stack
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, assert_plan_is_exact, no_warnings
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # transformers 5.24


def test_generating_between_steps(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = attach(model)
    prompt = LLAMA.make_inputs(2, 5, seed=3)
    for step in range(2):
        texts = []
        for each in (model, reference):
            with torch.no_grad():
                texts.append(each.generate(**prompt, max_new_tokens=4, do_sample=False, use_cache=True))
        assert torch.equal(*texts)
        inputs = LLAMA.make_inputs(2, 9, seed=step)
        assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))
    report = runtime.report()
    assert report.frames == 6
    assert not report.fallbacks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_forward_is_one_without_gradients(
    mode: Callable[[], AbstractContextManager[None]], attach: Attach
) -> None:
    model = LLAMA.build()
    runtime = attach(model)
    with mode():
        model(**LLAMA.make_inputs(2, 9, seed=0))
    model.eval()
    model(**LLAMA.make_inputs(2, 9, seed=0))
    model.train()
    with no_warnings():
        assert_plan_is_exact(LLAMA, runtime, model)


@pytest.mark.parametrize("choice", [None, plans.seeded(5)], ids=["recompute", "mixed"])
def test_autocast_on_a_model_in_fp32(choice: plans.Choose | None, attach: Attach) -> None:
    class Cast(Case):
        def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().loss(model, inputs)

    case = Cast("llama under autocast", LLAMA.build)
    model = case.build()
    runtime = attach(model) if choice is None else attach.chosen(case, choice, model)
    with no_warnings():
        assert_plan_is_exact(case, runtime, model)
        inside_and_outside(model, case)
    assert not runtime.report().stored_instead
    assert not runtime.report().fallbacks


def inside_and_outside(model: nn.Module, case: Case) -> None:
    """Backward inside the region, and forward in two regions with one cache of weight casts each."""
    reference = case.build()
    grads = []
    for each in (model, reference):
        each.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            case.loss(each, case.make_inputs(2, 9, seed=0)).backward()
        first, second = (case.loss(each, case.make_inputs(2, length, seed=1)) for length in (7, 12))
        first.backward()
        second.backward()
        grads.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert_bit_equal(*grads)


def test_checkpointing_that_is_switched_on_again_stays_off(attach: Attach) -> None:
    model = LLAMA.build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = [layer.gradient_checkpointing for layer in model.model.layers]
    runtime = attach(model)
    for _ in range(2):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with no_warnings():
            assert_plan_is_exact(LLAMA, runtime, model)
        assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    runtime.detach()
    assert [layer.gradient_checkpointing for layer in model.model.layers] == before == [True] * 3


def test_train_and_eval_and_frozen_blocks_take_turns(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = attach(model)
    for frozen in (False, True, False):
        for each in (model, reference):
            each.model.layers[0].mlp.requires_grad_(not frozen)
            each.model.embed_tokens.requires_grad_(not frozen)
        inputs = LLAMA.make_inputs(2, 9, seed=0)
        assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))
    assert not runtime.report().fallbacks


def test_a_model_converted_after_attaching(attach: Attach) -> None:
    model = LLAMA.build()
    runtime = attach(model)
    assert_plan_is_exact(LLAMA, runtime, model)
    model.to(torch.bfloat16)
    reference = copy.deepcopy(model)
    inputs = LLAMA.make_inputs(2, 9, seed=0)
    for _ in range(2):
        assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))


def test_a_parameter_replaced_after_attaching(attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    attach(model)
    for step in range(3):
        for each in (model, reference):
            each.layers[1].up.weight = nn.Parameter(each.layers[1].up.weight.detach() * 1.5)
        inputs = PLAIN.make_inputs(2, 9, seed=step)
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))


def test_padding_masks_come_and_go(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = attach(model)
    for padding in (True, False, True, False):
        inputs = LLAMA.make_inputs(2, 9, seed=0, padding=padding)
        assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))
    assert not runtime.report().fallbacks


def test_blocks_called_by_keyword(attach: Attach) -> None:
    class ByKeyword(Stack):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(input_ids)
            for layer in self.layers:
                hidden = layer(x=hidden)
            return self.head(hidden)

    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return ByKeyword(Plain, 2).to(dtype).train()

    case = Case("by keyword", build)
    model = build()
    assert_plan_is_exact(case, attach(model), model)
