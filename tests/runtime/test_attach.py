"""Attaching leaves no trace but the planned forwards, detaching none at all, and what is unsafe is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import plans
import pytest
import torch
from models import FAMILIES, Case, Injected, Pair, Plain, Stack
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, assert_plan_is_exact, warm_up
from torch import nn

import hilore_plan.runtime.attach as attach_module
from hilore_plan.errors import PlanMismatchError, RefusedError, UsageError
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.block import PlannedForward

# peft 0.21 asks transformers 5.24 by an old name; torch 2.13 deprecates what its own compiler imports
OLD_NAMES = ("ignore:.*gradient_checkpointing.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
pytestmark = [pytest.mark.filterwarnings(text) for text in OLD_NAMES]


def snapshot(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of every module, by identity where they are objects, with copies of its dictionaries."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


def assert_untouched(model: nn.Module, before: list[dict[str, Any]]) -> None:
    after = snapshot(model)
    for then, now in zip(before, after, strict=True):
        assert now.keys() == then.keys()
        for name, value in then.items():
            same = now[name] == value if isinstance(value, (dict, list, tuple, str, int, float)) else now[name] is value
            assert same, name


@pytest.mark.parametrize("case", [PLAIN, LLAMA], ids=["plain", "llama"])
def test_detach_restores_the_model_object(case: Case, attach: Attach) -> None:
    model = case.build()
    before = snapshot(model)
    runtime = attach(model)
    assert snapshot(model) != before
    case.gradients(model, case.make_inputs(2, 9, seed=0))
    runtime.detach()
    assert_untouched(model, before)
    runtime.detach()
    assert_untouched(model, before)


def test_detach_restores_a_forward_of_the_models_own(attach: Attach) -> None:
    model = PLAIN.build()
    layer = model.layers[1]
    own = layer.forward
    layer.forward = lambda x: 2 * own(x)
    before = snapshot(model)
    reference = copy_with_own_forward(model)
    runtime = attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))
    runtime.detach()
    assert_untouched(model, before)


def copy_with_own_forward(model: nn.Module) -> nn.Module:
    other = PLAIN.build()
    other.load_state_dict(model.state_dict())
    own = other.layers[1].forward
    other.layers[1].forward = lambda x: 2 * own(x)
    return other


def test_the_context_manager_detaches_also_after_an_error() -> None:
    model = PLAIN.build()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), apply(model, plans.make_plan(model)):
        raise ZeroDivisionError
    assert_untouched(model, before)


def test_an_error_half_way_through_apply_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PLAIN.build()
    before = snapshot(model)
    put, calls = attach_module._attach, []

    def fail_at_the_second(planned: PlannedForward) -> dict[str, Any]:
        calls.append(planned)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return put(planned)

    monkeypatch.setattr(attach_module, "_attach", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        apply(model, plans.make_plan(model))
    assert_untouched(model, before)


def test_an_error_in_forward_and_then_detach_leaves_the_model_as_it_was(attach: Attach) -> None:
    model = PLAIN.build()
    before = snapshot(model)
    runtime = attach(model)
    warm_up(PLAIN, model)
    bad = torch.zeros(2, 9, 33)
    with pytest.raises(RuntimeError):
        model.layers[0](bad)
    runtime.detach()
    assert_untouched(model, before)


def test_state_dict_keys_never_change_and_load(attach: Attach) -> None:
    model = LLAMA.build()
    keys = list(model.state_dict())
    runtime = attach(model)
    assert list(model.state_dict()) == keys
    warm_up(LLAMA, model)
    state = model.state_dict()
    assert list(state) == keys
    other = LLAMA.build(seed=1)
    attach(other)
    other.load_state_dict(state)
    runtime.detach()
    assert list(model.state_dict()) == keys


def test_a_deep_copy_is_plain_and_independent(attach: Attach) -> None:
    model = LLAMA.build()
    attach(model)
    warm_up(LLAMA, model)
    other = copy.deepcopy(model)
    assert not any(isinstance(getattr(module, "forward", None), PlannedForward) for module in other.modules())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    reference = LLAMA.build()
    inputs = LLAMA.make_inputs(2, 9, seed=0)
    assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))
    reference.load_state_dict(other.state_dict())
    assert_bit_equal(LLAMA.gradients(other, inputs), LLAMA.gradients(reference, inputs))
    assert attach(other).report().frames == 0  # and can have a plan of its own


def test_a_deep_copied_block_alone_is_plain(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    block = copy.deepcopy(model.layers[0])
    assert block.forward.__self__ is block


def test_a_deep_copy_keeps_a_forward_of_the_models_own(attach: Attach) -> None:
    model = PLAIN.build()
    layer = model.layers[0]
    layer.forward = Doubled(layer)
    attach(model)
    other = copy.deepcopy(model)
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        assert torch.equal(other.layers[0](x), model.layers[0](x))


class Doubled:
    """A wrapped forward, as other libraries put in place."""

    def __init__(self, block: nn.Module) -> None:
        self.inner = block.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = 2 * self.inner(x)
        return result


def test_pickling_an_attached_model_is_refused(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = attach(model)
    with pytest.raises(RefusedError, match=r"cannot be pickled while a plan is attached(?s:.*)detach"):
        pickle.dumps(model)
    runtime.detach()
    pickle.loads(pickle.dumps(model))  # noqa: S301


def test_a_second_plan_is_refused(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = attach(model)
    with pytest.raises(RefusedError, match=r"layers\.0 has a plan already(?s:.*)detach"):
        apply(model, plans.make_plan(model))
    runtime.detach()
    attach(model)


def test_reentrant_checkpointing_is_refused() -> None:
    model = LLAMA.build()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RefusedError, match=r"layers\.0.*use_reentrant=True(?s:.*)False"):
        apply(model, plans.make_plan(model))


def test_a_compiled_block_is_refused() -> None:
    model = PLAIN.build()
    model.layers[1].compile(backend="eager")
    with pytest.raises(RefusedError, match=r"layers\.1 is compiled"):
        apply(model, plans.make_plan(model))
    model = PLAIN.build()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    names = [f"layers.{i}" for i in range(3)]
    with pytest.raises(RefusedError, match=r"layers\.0 is compiled"):
        apply(model, plans.make_plan(model, blocks=names), blocks=names)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: LLAMA.build(num_hidden_layers=2), "with 3 blocks; this model has 2"),
        (lambda: LLAMA.build(dtype=torch.bfloat16), r"is float32\[.*here it is bfloat16\[.*more\)"),
        (lambda: LLAMA.build(intermediate_size=192), r"mlp\..* is float32\[.*128.*\].*here it is float32\[.*192.*\]"),
        (FAMILIES["qwen3"].build, r"absent"),
        (lambda: frozen(LLAMA.build()), r"there .* is .* trainable, here it is float32\[[^]]*\]( \(and|\n)"),
    ],
    ids=["depth", "dtype", "width", "family", "trainable"],
)
def test_a_plan_for_another_model_says_what_differs(other: Callable[[], nn.Module], says: str) -> None:
    plan = plans.make_plan(LLAMA.build())
    model = other()
    before = snapshot(model)
    with pytest.raises(PlanMismatchError, match=says):
        apply(model, plan)
    assert_untouched(model, before)


def frozen(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize(("planned", "runs"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_a_plan_for_another_attention_kernel_says_so(planned: str, runs: str, attach: Attach) -> None:
    source = LLAMA.build(attention=planned)
    runtime = attach(source)
    warm_up(LLAMA, source)
    runtime.detach()
    actions = plans.choose(plans.graphs_of(runtime), plans.store)
    model = LLAMA.build(attention=runs)
    attach(model, plans.make_plan(model, actions))
    with pytest.raises(PlanMismatchError, match=r"units that model\.layers\.0 does not have: (?s:.*)attention kernel"):
        model(**LLAMA.make_inputs(2, 9, seed=0))


def test_a_first_call_without_the_plans_mask_is_no_mismatch(attach: Attach) -> None:
    """transformers leaves out a mask that hides nothing: which of a run's batches has none is chance."""
    source = LLAMA.build()
    runtime = attach(source)
    masked = LLAMA.make_inputs(2, 9, seed=0, padding=True)
    LLAMA.gradients(source, masked)
    runtime.detach()
    actions = plans.choose(plans.graphs_of(runtime), plans.seeded(0))
    assert any("mask" in unit for unit in actions[0])
    model, reference = LLAMA.build(), LLAMA.build()
    attach(model, plans.make_plan(model, actions))
    for inputs in (LLAMA.make_inputs(2, 9, seed=0), masked, LLAMA.make_inputs(2, 11, seed=1)):
        assert_bit_equal(LLAMA.gradients(model, inputs), LLAMA.gradients(reference, inputs))


def test_blocks_may_be_listed_by_name_or_as_modules(attach: Attach) -> None:
    class Two(nn.Module):
        """Blocks that stand alone, in no list."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.first, self.second = nn.Embedding(256, 32), Plain(), Plain()
            self.head = nn.Linear(32, 256)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(self.stem(input_ids))))

    case = Case("two", lambda dtype=torch.float32: Two().to(dtype))
    with pytest.raises(UsageError, match="no repeated blocks"):
        apply(Two(), plans.make_plan(PLAIN.build()))
    for blocks in (["first", "second"], None):
        model = Two()
        listed = blocks or [model.second]
        runtime = attach(model, plans.make_plan(model, blocks=listed), blocks=listed)
        assert_plan_is_exact(case, runtime, model)
        assert runtime.report().frames == 2 * len(listed)


@pytest.mark.parametrize("block", [Injected, Pair], ids=["keyword_from_hook", "tuple"])
def test_hooks_of_the_user_run_once_a_forward(block: Callable[[], nn.Module], attach: Attach) -> None:
    """Capturing is tracing, and runs hooks of submodules on fake tensors; so this is about what comes after it."""
    calls: list[str] = []

    def hooked() -> nn.Module:
        model = Stack(block, 2).train()
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
            layer.register_forward_hook(lambda module, args, out: calls.append("after"))
            layer.up.register_forward_hook(lambda module, args, out: calls.append("inside"))
            layer.register_full_backward_hook(lambda module, grads, out: calls.append("backward"))
        return model

    other, model = hooked(), hooked()
    attach(other)
    warm_up(PLAIN, other)  # captures what the other's blocks, whose hooks do the same, share
    attach(model)
    for _ in range(2):  # the trial, and a later frame
        calls.clear()
        PLAIN.gradients(model, PLAIN.make_inputs(2, 9, seed=0))
        assert sorted(calls) == sorted(["before", "after", "inside", "backward"] * 2)


def lora(case: Case, dtype: torch.dtype, dropout: float = 0.0) -> nn.Module:
    """A model with adapters that have learnt something: B is zero at the start, which hides mistakes in A."""
    model = peft.get_peft_model(
        case.build(dtype=dtype),
        peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"]),
        autocast_adapter_dtype=False,
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_with_lora_is_bit_equal(dtype: torch.dtype, dropout: float, attach: Attach) -> None:
    case = Case("lora", lambda dtype: lora(LLAMA, dtype, dropout))
    model = case.build(dtype=dtype)
    runtime = attach(model)
    assert_plan_is_exact(case, runtime, model)
    runtime.detach()
    graphs = plans.graphs_of(runtime)
    mixed = plans.make_plan(model, plans.choose(graphs, plans.seeded(1)))
    assert_plan_is_exact(case, attach(model, mixed), model)


def test_lora_switched_off_and_on_again_is_bit_equal(attach: Attach) -> None:
    case = Case("lora", lambda dtype: lora(LLAMA, dtype))
    model, reference = case.build(dtype=torch.float32), case.build(dtype=torch.float32)
    attach(model)
    inputs = case.make_inputs(2, 9, seed=0)
    for _ in range(2):
        with model.disable_adapter(), reference.disable_adapter(), torch.no_grad():
            assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))


def test_a_first_frame_beyond_the_plan_does_not_hide_a_mismatch() -> None:
    model = PLAIN.build()
    plan = plans.make_plan(model, [{"no.such.unit": "store"}, {}, {}], tokens=(20,))
    with apply(model, plan):
        PLAIN.gradients(model, PLAIN.make_inputs(3, 11, seed=1))
        with pytest.raises(PlanMismatchError, match=r"no\.such\.unit"):
            PLAIN.gradients(model, PLAIN.make_inputs(1, 11, seed=1))
