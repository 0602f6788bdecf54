"""Faults 10, 12 to 14, 16 and 17: caches, shards, and forwards that wait for their backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import plans
import pytest
import torch
from models import WIDTH, Case, Plain, Stack
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, collector_off, live_tensors, no_warnings, warm_up
from torch import nn

from hilore_plan.errors import RecoveryError
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.frame import live_frames

MIXED = plans.seeded(4)
CHOICES = {"recompute": lambda value: "recompute", "store": plans.store, "mixed": MIXED}


def case_of(block: Callable[[], nn.Module], depth: int = 2) -> Case:
    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Stack(block, depth).to(dtype).train()

    return Case(block.__name__, build)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_10_a_weight_cast_that_another_block_or_a_forward_without_gradient_made(
    choice: plans.Choose, attach: Attach
) -> None:
    """Autocast casts a weight once a region: two blocks share one here, and sampling has used it before."""

    class Autocast(Case):
        def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    model(**inputs)
                return super().loss(model, inputs) + super().loss(model, inputs)

    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        model = PLAIN.build(dtype=dtype)
        model.layers[1].up.weight = model.layers[0].up.weight
        return model

    case = Autocast("autocast", build)
    model, reference = build(), build()
    attach.chosen(case, choice, model)
    for step in range(2):
        inputs = case.make_inputs(2, 9, seed=step)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_12_two_lengths_in_flight_are_not_mixed_up(choice: plans.Choose, attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    attach.chosen(LLAMA, choice, model, tokens=(20, 40))
    warm_up(LLAMA, model)
    found = []
    for each in (model, reference):
        each.zero_grad(set_to_none=True)
        waiting = [LLAMA.loss(each, LLAMA.make_inputs(2, length, seed=length)) for length in (6, 19, 30)]
        for index in (1, 0, 2):
            waiting[index].backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert_bit_equal(*found)
    assert live_frames() == 0


@contextmanager
def sharded(model: nn.Module) -> Iterator[None]:
    """Each block's parameters are empty but while it runs, as sharding engines that free storages have it."""
    kept = {p: p.detach().clone() for layer in model.layers for p in layer.parameters()}

    def fill(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                parameter.untyped_storage().resize_(kept[parameter].untyped_storage().nbytes())
                parameter.copy_(kept[parameter])

    def free(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.untyped_storage().resize_(0)

    def after(layer: nn.Module, args: object, output: torch.Tensor) -> None:
        free(layer)
        output.register_hook(lambda grad: fill(layer))

    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, args: fill(layer))
        layer.register_forward_hook(after)
    yield
    for layer in model.layers:
        fill(layer)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_13_a_parameter_that_is_empty_between_forward_and_backward(choice: plans.Choose, attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    attach.chosen(PLAIN, choice, model)
    with sharded(model):
        for step in range(3):
            inputs = PLAIN.make_inputs(2, 9, seed=step)
            assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))


def test_13_a_parameter_that_is_still_a_shard_when_it_is_read_is_an_error(attach: Attach) -> None:
    """An engine that swaps `parameter.data`, and did not put it back in time: no number, and not a crash."""
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    weight = model.layers[1].up.weight
    weight.data = torch.empty(0)
    with pytest.raises(RecoveryError, match=r"parameter up\.weight .*\[0\].*\[64, 32\]") as caught:
        loss.backward()
    assert "ZeRO" in caught.value.hint


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_14_a_backward_that_stops_early_leaves_nothing(choice: plans.Choose, attach: Attach) -> None:
    """Only the last block's gradient is asked for: the frames of the others never run, and die with the graph."""
    model = PLAIN.build()
    attach.chosen(PLAIN, choice, model)
    warm_up(PLAIN, model)
    with collector_off():
        before = live_tensors()
        for step in range(20):
            loss = PLAIN.loss(model, PLAIN.make_inputs(2, 5 + step % 3, seed=step))
            torch.autograd.grad(loss, [model.layers[2].down.weight, model.layers[2].up.weight])
            del loss
            assert live_frames() == 0
        assert live_tensors() == before


def test_14_a_step_leaves_no_object_behind(attach: Attach) -> None:
    """Not tensors alone: any cycle of Python objects adds up, frame by frame."""
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    with collector_off():
        before = len(gc.get_objects())
        for step in range(20):
            PLAIN.gradients(model, PLAIN.make_inputs(2, 9, seed=step))
            model.zero_grad(set_to_none=True)
        assert len(gc.get_objects()) - before < 20


class Lazy(Plain):
    """Makes a table at its first forward, in whatever mode that runs, and a longer one when it needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.empty(0, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if len(self.table) < length:
            self.table = torch.cos(torch.arange(length * WIDTH) / length).view(length, WIDTH).to(x.dtype)
        return super().forward(x + self.table[:length])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_16_a_first_forward_without_gradient_and_then_training(
    mode: Callable[[], AbstractContextManager[None]], choice: plans.Choose, attach: Attach
) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = attach.chosen(LLAMA, choice, model)
    for step in range(2):
        inputs = LLAMA.make_inputs(2, 9 + step, seed=step)
        with mode():
            outputs = [each(**inputs).logits for each in (model, reference)]
        assert torch.equal(*outputs)
        with no_warnings():
            assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))
    assert runtime.report().frames == 6
    assert not runtime.report().stored_instead


def test_16_a_table_that_was_made_without_gradient_and_grows_later(attach: Attach) -> None:
    """No parameter, buffer or argument: a graph would have the old table in it for ever."""
    case = case_of(Lazy)
    model, reference = case.build(), case.build()
    attach(model)
    with pytest.warns(HiloreWarning, match=r"a tensor \(table\) that is no parameter, buffer or argument"):
        sample_and_train(case, (model, reference))


def sample_and_train(case: Case, models: tuple[nn.Module, nn.Module]) -> None:
    for length in (9, 5, 14, 9, 14):
        inputs = case.make_inputs(2, length, seed=length)
        with torch.no_grad():
            outputs = [model(**inputs) for model in models]
        assert torch.equal(*outputs)
        assert_bit_equal(*(case.gradients(model, inputs) for model in models))


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_17_two_backwards_through_one_forward(choice: plans.Choose, attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    attach.chosen(LLAMA, choice, model)
    warm_up(LLAMA, model)
    found = []
    for each in (model, reference):
        each.zero_grad(set_to_none=True)
        loss = LLAMA.loss(each, LLAMA.make_inputs(2, 9, seed=0))
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_bit_equal(*found)
    assert live_frames() == 0
