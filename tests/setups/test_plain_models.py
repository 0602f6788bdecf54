"""What people do to a model that has a plan: copy it, pickle it, hook it, rebuild it, use it for something else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import plans
import pytest
import torch
from models import MODELS, Case, Plain, Stack
from runtime.rig import LLAMA, PLAIN, Attach, Gradients, assert_bit_equal, no_warnings, warm_up
from setups.plain_loops import adam, batches, clipping_by_norm, train
from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.block import HiloreWarning, PlannedForward
from hilore_plan.runtime.identity import MOST_KINDS

pytestmark = pytest.mark.setups

CASES = {case.name: case for case in (PLAIN, LLAMA)}
INPUTS = PLAIN.make_inputs(2, 9, seed=0)
both = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
orders = pytest.mark.parametrize("trained", [False, True], ids=["before_training", "after_training"])


def steps(*models: nn.Module, count: int = 2, case: Case = PLAIN) -> None:
    """Gradients of all models are the same, for the trial and for later frames."""
    for seed in range(count):
        inputs = case.make_inputs(2, 9 + seed, seed=seed)
        found = [case.gradients(model, inputs) for model in models]
        for other in found[1:]:
            assert_bit_equal(found[0], other)


# copies


def is_planned(model: nn.Module) -> bool:
    return any(isinstance(vars(module).get("forward"), PlannedForward) for module in model.modules())


@both
@orders
def test_a_copy_is_a_plain_model_that_trains_alike(case: Case, trained: bool, attach: Attach) -> None:
    model = case.build()
    runtime = attach.chosen(case, plans.seeded(5), model)
    if trained:
        train(clipping_by_norm, case, model)
    frames = runtime.report().frames
    twin = copy.deepcopy(model)
    assert not is_planned(twin)
    got = train(clipping_by_norm, case, twin)
    assert runtime.report().frames == frames
    assert_bit_equal(got, train(clipping_by_norm, case, model))
    assert runtime.report().frames > frames


def test_a_copy_with_a_plan_of_its_own_has_nothing_to_do_with_the_first(attach: Attach) -> None:
    model = PLAIN.build()
    first = attach(model)
    twin = copy.deepcopy(model)
    second = attach.chosen(PLAIN, plans.seeded(5), twin)
    first.detach()
    steps(twin, model)
    assert (first.report().frames, second.report().frames) == (0, 6)


def test_a_copy_of_a_model_whose_frames_are_in_flight(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    loss = PLAIN.loss(model, INPUTS)
    twin = copy.deepcopy(model)
    loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    assert_bit_equal(PLAIN.gradients(twin, INPUTS), got)


def test_pickling_is_refused_and_a_state_dict_is_not(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = attach(model)
    for dump in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(RefusedError, match=r"cannot be pickled while a plan is attached(?s:.*)detach"):
            dump(model)
    kept = pickle.dumps(model.state_dict())
    runtime.detach()
    other = PLAIN.build(seed=1)
    other.load_state_dict(pickle.loads(kept))  # noqa: S301
    attach(other)
    steps(model, other, pickle.loads(pickle.dumps(model)))  # noqa: S301


# two models in one process


@pytest.mark.parametrize("planned", [(True, True), (True, False), (False, True)], ids=["both", "policy", "reference"])
def test_a_policy_and_its_reference(planned: tuple[bool, bool], attach: Attach) -> None:
    """The reference model is in training mode, as TRL leaves it, and answers without gradients."""
    ends: list[Gradients] = []
    for plan in (planned, (False, False)):
        policy, reference = LLAMA.build(), LLAMA.build(seed=1)
        runtimes = [attach(model) for model, wanted in zip((policy, reference), plan, strict=True) if wanted]
        optimizer = adam(policy)
        for inputs in batches(LLAMA):
            with torch.no_grad():
                far = LLAMA.loss(reference, inputs)
            loss = LLAMA.loss(policy, inputs)
            (loss + (loss - far).square()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: p.detach() for name, p in policy.named_parameters()})
        for runtime in runtimes:
            assert runtime.report().frames == (6 if runtime is runtimes[0] and plan[0] else 0)
    assert_bit_equal(*ends)


def test_two_models_that_train_into_each_other(attach: Attach) -> None:
    """One loss through both, each with its own plan, forwards and backwards interleaved."""
    ends: list[Gradients] = []
    for planned in (True, False):
        one, other = PLAIN.build(), PLAIN.build(seed=1)
        if planned:
            attach(one)
            attach.chosen(PLAIN, plans.seeded(5), other)
        for inputs in batches(PLAIN):
            first, second = PLAIN.loss(one, inputs), PLAIN.loss(other, inputs)
            (first - second).square().backward()
            (PLAIN.loss(one, inputs) * first.detach()).backward()
        ends.append({f"{i}.{n}": p.grad for i, m in enumerate((one, other)) for n, p in m.named_parameters()})
    assert_bit_equal(*ends)


# the same block more than once


def test_layers_shared_within_the_list_of_blocks(attach: Attach) -> None:
    def build() -> nn.Module:
        model = PLAIN.build(depth=4)
        model.layers[2], model.layers[3] = model.layers[0], model.layers[1]
        return model

    model = build()
    runtime = attach(model)
    steps(model, build())
    assert runtime.report().frames == 8


def test_a_block_shared_by_two_models(attach: Attach) -> None:
    """A planned block belongs to the runtime that came first; a second plan for it is refused."""
    one, other = PLAIN.build(), PLAIN.build(seed=1)
    other.layers[0] = one.layers[0]
    attach(one)
    with pytest.raises(RefusedError, match=r"layers\.0 has a plan already"):
        apply(other, plans.make_plan(other))
    plain = PLAIN.build(seed=1)
    plain.layers[0] = PLAIN.build().layers[0]
    steps(other, plain)


# parameters from elsewhere


def fresh(model: nn.Module) -> nn.Module:
    """The model with parameters that were never changed in place, as those of no other model can be told from them."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach().clone()))
    return model


@both
@orders
def test_parameters_that_live_outside_of_the_model(case: Case, trained: bool, attach: Attach) -> None:
    """`functional_call` puts the model's own back after forward: what backward rebuilds must not be made of those."""
    model, reference = fresh(case.build()), fresh(case.build())
    attach(model)
    if trained:
        warm_up(case, model)
    found: list[Gradients] = []
    for each in (model, reference):
        outside = {name: (p.detach() * 1.5).requires_grad_() for name, p in each.named_parameters()}
        output = torch.func.functional_call(each, outside, kwargs=case.make_inputs(2, 9, seed=0))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        logits.square().mean().backward()
        found.append({name: p.grad for name, p in outside.items() if p.grad is not None})
    assert_bit_equal(*found)


def test_a_parameter_replaced_between_forward_and_backward(attach: Attach) -> None:
    found: list[Gradients] = []
    model, reference = fresh(PLAIN.build()), fresh(PLAIN.build())
    attach(model)
    warm_up(PLAIN, model)
    for each in (model, reference):
        before = dict(each.named_parameters())
        loss = PLAIN.loss(each, INPUTS)
        fresh(each)
        loss.backward()
        found.append({name: p.grad for name, p in before.items()})
    assert_bit_equal(*found)


TRANSFORMS: dict[str, Callable[[Callable[..., Any], dict[str, torch.Tensor]], Any]] = {
    "grad": lambda loss, p: torch.func.grad(loss)(p),
    "vjp": lambda loss, p: torch.func.vjp(loss, p)[1](torch.ones(()))[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_functional_transform_stores_with_one_warning_a_block(
    transform: Callable[[Callable[..., Any], Any], Any], attach: Attach
) -> None:
    def gradients(model: nn.Module) -> Gradients:
        outside = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters: Gradients) -> torch.Tensor:
            value: torch.Tensor = torch.func.functional_call(model, parameters, kwargs=INPUTS).square().mean()
            return value

        result: Gradients = transform(loss, outside)
        return result

    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach(model)
    with pytest.warns(HiloreWarning, match=r"layers\.\d.*inside a torch\.func transform.*: stored") as caught:
        got = gradients(model)
    assert len(caught) == 3
    with no_warnings():
        assert_bit_equal(got, gradients(reference))
        assert_bit_equal(gradients(model), got)
        steps(model, reference)  # and outside of it the plan is at work
    assert runtime.report().frames == 6


def test_an_ensemble_under_vmap_is_not_passed_over_in_silence(attach: Attach) -> None:
    def gradients(model: nn.Module) -> Gradients:
        stacked = {n: torch.stack([p.detach(), 2 * p.detach()]).requires_grad_() for n, p in model.named_parameters()}
        call = torch.func.vmap(lambda p: torch.func.functional_call(model, p, kwargs=INPUTS))
        call(stacked).square().mean().backward()
        return {name: p.grad for name, p in stacked.items() if p.grad is not None}

    model = PLAIN.build()
    attach(model)
    with pytest.warns(HiloreWarning, match=r"inside a torch\.func transform"):
        got = gradients(model)
    assert_bit_equal(got, gradients(PLAIN.build()))


class Masked(Plain):
    """Adds a mask, which autograd saves nowhere, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("shift", torch.linspace(-1, 1, 64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.up(self.norm(x)) + self.shift + mask)
        return x + self.down(torch.tanh(h))


class WithMask(Stack):
    """Makes its mask where rollouts are made, without gradients and for good."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            mask = self.mask = torch.cos(input_ids * 0.7)[..., None]
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        result: torch.Tensor = self.head(hidden)
        return result


def masked() -> nn.Module:
    torch.manual_seed(0)
    return WithMask(Masked, 2).train()


def test_tensors_made_under_inference_mode(attach: Attach) -> None:
    model = masked()
    runtime = attach(model)
    with no_warnings():
        steps(model, masked(), count=3)
    assert runtime.report().frames == 6


def test_tensors_made_under_inference_mode_may_be_used_again(attach: Attach) -> None:
    """Their changes count no versions; autograd has kept nothing of a mask, so what a plan keeps of it is a copy."""
    model, reference = masked(), masked()
    attach(model)
    warm_up(PLAIN, model)
    found: list[Gradients] = []
    for each in (model, reference):
        each.zero_grad()
        loss = PLAIN.loss(each, INPUTS)
        with torch.inference_mode():
            each.mask.zero_()
        loss.backward()
        found.append({name: p.grad for name, p in each.named_parameters()})
    assert_bit_equal(*found)


# hooks


def scaled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


def shifted(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    return args[0] + 0.25


def reversed_gradient(module: nn.Module, grads: tuple[torch.Tensor, ...], outer: tuple[torch.Tensor, ...]) -> Any:
    return tuple(-grad for grad in grads)


def reversed_before(module: nn.Module, grads: tuple[torch.Tensor, ...]) -> Any:
    return tuple(-grad for grad in grads)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(scaled),
    "pre": lambda module: module.register_forward_pre_hook(shifted),
    "backward": lambda module: module.register_full_backward_hook(reversed_gradient),
    "backward_pre": lambda module: module.register_full_backward_pre_hook(reversed_before),
    "forward_own": lambda module: module.register_forward_hook(lambda module, args, output: output * 1.5),
}


@pytest.mark.parametrize("place", ["block", "up", "down"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_comes_and_goes(hook: Callable[[nn.Module], Any], place: str, attach: Attach) -> None:
    """Before the plan, after its first frames, and away again: the plan always rebuilds what forward computed."""
    model, reference = PLAIN.build(), PLAIN.build()

    def put() -> list[Any]:
        layers = [*model.layers, *reference.layers]
        return [hook(layer if place == "block" else getattr(layer, place)) for layer in layers]

    early = put()
    runtime = attach.chosen(PLAIN, plans.seeded(5), model)
    with no_warnings():
        steps(model, reference)
        late = put()
        steps(model, reference, count=3)
        for handle in early:
            handle.remove()
        steps(model, reference, count=3)
        for handle in late:
            handle.remove()
        steps(model, reference, PLAIN.build(), count=3)
    report = runtime.report()
    assert report.frames == 33
    assert not report.stored_instead


def test_a_hook_that_does_nothing_at_first(attach: Attach) -> None:
    """What it does later must be in the graph from the start: no comparison of the first frames would show it."""
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach(model)
    warm_up(PLAIN, model)
    for each in (model, reference):
        for layer in each.layers:
            layer.up.register_forward_hook(lambda module, args, output: torch.where(output > 3, 3 + output / 9, output))
    for _ in range(2):
        steps(model, reference)
        with torch.no_grad():
            for each in (model, reference):
                for layer in each.layers:
                    layer.up.weight.mul_(8)
    assert not runtime.report().fallbacks


def test_blocks_whose_hooks_do_the_same_share_a_graph() -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    for each in (model, reference):
        for number, layer in enumerate(each.layers):
            layer.up.register_forward_hook(lambda module, args, output, factor=1 + number // 2: output * factor)
    with apply(model, plans.make_plan(model)) as runtime:
        steps(model, reference)
    assert runtime.report().captures == 2


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # transformers 5.24
def test_router_logits_that_hooks_collect_come_from_forward_alone(attach: Attach) -> None:
    """They go into the loss; what the same hooks see of a block that is being captured must not."""
    case = MODELS["qwen3_moe"]
    model, reference = case.build(dtype=torch.bfloat16), case.build(dtype=torch.bfloat16)
    with apply(model, plans.make_plan(model)) as runtime:
        for seed in range(2):
            inputs = case.make_inputs(2, 9, seed=seed)
            for each in (model, reference):
                output = each(**inputs, output_router_logits=True)
                assert output.aux_loss > 0
                (output.logits.square().mean() + output.aux_loss).backward()
            found = [{n: p.grad for n, p in each.named_parameters()} for each in (model, reference)]
            assert_bit_equal(*found)
    assert runtime.report().frames == 2 * len(model.model.layers)
    assert not runtime.report().fallbacks


def test_a_new_hook_in_every_step_ends_in_checkpointing(attach: Attach) -> None:
    """Captured with each, until it is clear that this has no end."""
    model, reference = PLAIN.build(depth=1), PLAIN.build(depth=1)
    runtime = attach(model, blocks=["layers.0"])

    def change_and_train() -> None:
        for step in range(MOST_KINDS + 2):
            for each in (model, reference):
                each.layers[0].up.register_forward_hook(lambda m, a, out, factor=1.1 + step / 100: out * factor)
            steps(model, reference)

    with pytest.warns(HiloreWarning, match="keep changing.*checkpointed") as caught:
        change_and_train()
    assert len(caught) == 1
    assert "layers.0" in runtime.report().fallbacks


# parts that change


class Twice(nn.Module):
    """Another layer around the one that was there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * torch.sigmoid(self.gate * y)


def swap_a_layer(model: nn.Module) -> None:
    for layer in model.layers:
        layer.up = Twice(layer.up)


def reparametrize(model: nn.Module) -> None:
    for layer in model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.up)


def prune(model: nn.Module) -> None:
    from torch.nn.utils import prune as pruning

    for layer in model.layers:
        pruning.l1_unstructured(layer.up, "weight", amount=0.3)


def patch_a_forward(model: nn.Module) -> None:
    for layer in model.layers:
        own = layer.up.forward
        layer.up.forward = lambda x, own=own: torch.tanh(own(x))


def add_adapters(model: nn.Module) -> None:
    import peft

    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up"], r=2, init_lora_weights=False), model)


REBUILT = {each.__name__: each for each in (swap_a_layer, reparametrize, prune, patch_a_forward, add_adapters)}


@pytest.mark.parametrize("rebuild", REBUILT.values(), ids=REBUILT)
def test_a_block_rebuilt_after_its_first_frames_is_captured_anew(
    rebuild: Callable[[nn.Module], None], attach: Attach
) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach.chosen(PLAIN, plans.seeded(5), model)
    with no_warnings():
        steps(model, reference)
        rebuild(model)
        rebuild(reference)
        steps(model, reference, count=3)
    report = runtime.report()
    assert report.frames == 15
    assert not report.fallbacks
    assert not report.stored_instead


def test_moved_to_another_dtype_between_forward_and_backward(attach: Attach) -> None:
    """Autograd itself refuses gradients of another dtype; a plan rebuilds nothing from the converted parameters."""
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    loss = PLAIN.loss(model, INPUTS)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_every_awkward_block_survives_a_loop(attach: Attach) -> None:
    for name in ("in_place", "tied", "keyword_from_hook", "tuple", "own_buffer"):
        case = MODELS[name]
        model, reference = case.build(), case.build()
        attach.chosen(case, plans.seeded(5), model)
        assert_bit_equal(train(clipping_by_norm, case, model), train(clipping_by_norm, case, reference))


def test_replicas_in_threads_are_refused(attach: Attach) -> None:
    """With several devices only: `DataParallel` on one is the model itself."""
    model = nn.DataParallel(PLAIN.build())
    runtime = attach(model)
    steps(model.module, PLAIN.build())
    assert runtime.report().frames == 6
    runtime.detach()
    model.device_ids = [0, 1]
    with pytest.raises(RefusedError, match=r"DataParallel(?s:.*)torchrun"):
        apply(model, plans.make_plan(model))
