"""R1 to R11 of hilore_plan/runtime/RULES.md, R11 in `test_compressed.py`: tests that fail when a rule is broken."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import plans
import pytest
import torch
from models import MODELS, WIDTH, Plain, Stack
from runtime.rig import (
    LLAMA,
    PLAIN,
    Attach,
    HandleLog,
    assert_bit_equal,
    assert_plan_is_exact,
    collector_off,
    describe,
    live_tensors,
    warm_up,
)
from torch import nn

from hilore_plan.errors import RecoveryError
from hilore_plan.runtime.attach import Runtime
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.frame import Handle, Stage, live_frames, unpack
from hilore_plan.runtime.hooks import TrialPacker
from hilore_plan.runtime.kept import Kept, Narrowed


class EndsInTanh(Plain):
    """Its output is saved by the op that makes it: kept undetached, output and graph would hold each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


def stack(block: Callable[[], nn.Module], seed: int = 0, depth: int = 3) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(block, depth).train()


def test_r1_what_is_kept_has_no_graph(attach: Attach, handles: HandleLog) -> None:
    model = PLAIN.build()
    attach.chosen(PLAIN, plans.store, model)
    warm_up(PLAIN, model)
    handles.clear()
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    kept = [handle.tensor for handle in handles.handles if handle.tensor is not None]
    assert kept
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in kept)
    loss.backward()


def test_r1_a_trial_keeps_nothing_with_a_graph_either(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    pack = TrialPacker.pack

    def watch(packer: TrialPacker, tensor: torch.Tensor) -> Handle:
        handle = pack(packer, tensor)
        kept.append(handle.tensor is not None and handle.tensor.grad_fn is None and not handle.tensor.requires_grad)
        return handle

    monkeypatch.setattr(TrialPacker, "pack", watch)
    model = PLAIN.build()
    attach(model)
    PLAIN.gradients(model, PLAIN.make_inputs(2, 9, seed=0))
    assert kept
    assert all(kept)


def test_r1_an_output_that_its_own_op_saves_is_freed_without_a_collector(attach: Attach) -> None:
    model = stack(EndsInTanh)
    runtime = attach(model)
    warm_up(PLAIN, model)
    graphs = plans.graphs_of(runtime)
    runtime.detach()
    attach(model, plans.make_plan(model, plans.choose(graphs, plans.store)))
    warm_up(PLAIN, model)
    with collector_off():
        before = live_tensors()
        for step in range(5):
            PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=step))  # never run backward: handles die with their graph
        assert live_tensors() == before


@pytest.mark.parametrize("choice", [plans.store, plans.seeded(3)], ids=["stored", "mixed"])
def test_r2_a_kept_tensor_that_changed_is_an_error(attach: Attach, handles: HandleLog, choice: plans.Choose) -> None:
    model = PLAIN.build()
    attach.chosen(PLAIN, choice, model)
    warm_up(PLAIN, model)
    handles.clear()
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = [handle.tensor for handle in handles.handles if handle.tensor is not None]
    changed = next(tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in parameters)
    changed.add_(1.0)
    with pytest.raises(RecoveryError, match="modified in place between forward and backward"):
        loss.backward()


def test_r2_a_source_of_a_program_that_changed_is_an_error(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    seen: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    hook.remove()
    with torch.no_grad():
        seen[0].add_(1.0)
    with pytest.raises(RecoveryError, match=r"a kept value of shape .* was modified in place"):
        loss.backward()


def test_r2_a_parameter_that_changed_is_an_error_and_is_named(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    with torch.no_grad():
        model.layers[2].up.bias.add_(1.0)  # plain autograd saves no bias; a program reads it
    with pytest.raises(RecoveryError, match=r"parameter up\.bias was modified in place"):
        loss.backward()


def test_r3_a_value_is_narrowed_once_and_widened_once(attach: Attach, handles: HandleLog) -> None:
    model = LLAMA.build(dtype=torch.bfloat16)
    attach.chosen(LLAMA, plans.cast, model)
    warm_up(LLAMA, model)
    handles.clear()
    loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
    narrowed = [handle for handle in handles.handles if isinstance(handle.owner, Narrowed)]
    owners = {id(handle.owner) for handle in narrowed}
    graph = attach.graphs(LLAMA, model)[0]
    values = [value for value in graph.values if value.narrow and value.slots]
    assert len(owners) == len(values) * 3
    several = max(values, key=lambda value: len(value.slots))
    assert len(several.slots) > 1, "no value of this model is saved twice: the test shows nothing"
    by_owner: dict[int, set[int]] = {}
    for handle in narrowed:
        by_owner.setdefault(id(handle.owner), set()).add(unpack(handle).untyped_storage().data_ptr())
    assert all(len(storages) == 1 for storages in by_owner.values())
    loss.backward()


def test_r3_slots_of_one_rebuilt_value_share_its_storage(attach: Attach, handles: HandleLog) -> None:
    model = LLAMA.build()
    runtime = attach(model)
    warm_up(LLAMA, model)
    graph = plans.graphs_of(runtime)[0]
    handles.clear()
    loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
    first_block = handles.handles[: len(graph.slots)]
    storages: dict[int, set[int]] = {}
    held = []
    for handle in first_block:
        if isinstance(handle.owner, Stage):
            held.append(unpack(handle))
            slot = graph.slots[handle.slot]
            if {graph.slots[other].stage for other in graph.values[slot.value].slots} == {slot.stage}:
                storages.setdefault(slot.value, set()).add(held[-1].untyped_storage().data_ptr())
    assert any(len(graph.values[value].slots) > 1 for value in storages)
    assert all(len(places) == 1 for places in storages.values())
    loss.backward()


@pytest.mark.parametrize("name", ["views", "square", "in_place"])
def test_r4_everything_comes_back_with_its_shape_strides_and_dtype(
    name: str, attach: Attach, handles: HandleLog
) -> None:
    case = MODELS[name]
    model = case.build(dtype=torch.bfloat16)
    attach.chosen(case, plans.seeded(1), model)
    warm_up(case, model)
    handles.clear()
    loss = case.loss(model, case.make_inputs(2, 9, seed=0))
    rebuilt = [(handle, saved) for handle, saved in zip(handles.handles, handles.saved, strict=True) if handle.owner]
    assert rebuilt
    for handle, saved in rebuilt:
        assert describe(unpack(handle)) == saved
    loss.backward()


@pytest.mark.parametrize(
    "spoil",
    [lambda t: t[..., :-1], lambda t: t.mT.contiguous().mT, lambda t: t.double(), lambda t: t.to("meta")],
    ids=["shape", "strides", "dtype", "device"],
)
def test_r4_a_slot_that_is_rebuilt_otherwise_is_an_error(
    spoil: Callable[[torch.Tensor], torch.Tensor], attach: Attach, handles: HandleLog
) -> None:
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    handles.clear()
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    stage = next(handle.owner for handle in reversed(handles.handles) if isinstance(handle.owner, Stage))
    results = _results(stage)
    wrong = next(i for i, tensor in enumerate(results) if tensor.dim() == 3 and tensor.shape[-1] > 1)
    spoiled = (*results[:wrong], spoil(results[wrong]), *results[wrong + 1 :])
    with pytest.raises(RecoveryError, match="was rebuilt"):
        stage._receive(spoiled)
    del stage, results, spoiled
    loss.backward()


def _results(stage: Stage) -> tuple[torch.Tensor, ...]:
    """What a stage's program gives."""
    assert stage.sources is not None
    state = stage.state.read(stage.program.state, stage.notes)
    with torch.no_grad():
        return stage.program.run(*stage.sizes, *state, *(source.base() for source in stage.sources))


@pytest.mark.parametrize("choice", [None, plans.store, plans.cast], ids=["recompute", "store", "cast"])
def test_r5_what_a_block_kept_is_gone_when_backward_has_left_it(
    choice: plans.Choose | None, attach: Attach, handles: HandleLog
) -> None:
    model = LLAMA.build(dtype=torch.bfloat16)
    if choice is None:
        attach(model)
    else:
        attach.chosen(LLAMA, choice, model)
    warm_up(LLAMA, model)
    handles.clear()
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: outputs.append(out)) for layer in model.model.layers]
    alive: list[int] = []
    with collector_off():
        loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
        last = handles.handles[-len(handles.handles) // 3 :]
        owners = [weakref.ref(handle.owner) for handle in last if isinstance(handle.owner, Stage)]
        kept = [weakref.ref(handle.tensor) for handle in last if handle.tensor is not None]
        del last
        handles.clear()
        outputs[1].register_hook(lambda grad: alive.append(sum(ref() is not None for ref in (*owners, *kept))))
        outputs.clear()
        loss.backward()
        assert owners or kept
        assert alive == [0]
        assert live_frames() == 0  # although `loss` still holds the graph
    for hook in hooks:
        hook.remove()


def test_r5_a_stage_holds_the_earlier_one_only_until_that_has_handed_over(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLAMA.build()
    attach(model)
    warm_up(LLAMA, model)
    alive_before: list[int] = []
    receive = Stage._receive

    def watch(stage: Stage, results: tuple[torch.Tensor, ...]) -> None:
        alive_before.append(live_frames())
        receive(stage, results)

    monkeypatch.setattr(Stage, "_receive", watch)
    with collector_off():
        LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0)).backward()
        assert alive_before == [6, 5, 4, 3, 2, 1]  # two stages a block, each gone before the next one runs
        assert live_frames() == 0


def test_r5_a_rebuilt_tensor_is_handed_over_not_kept(attach: Attach, handles: HandleLog) -> None:
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    handles.clear()
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    handle = next(handle for handle in reversed(handles.handles) if isinstance(handle.owner, Stage))
    taken = weakref.ref(unpack(handle))
    assert taken() is None
    loss.backward()


def test_r5_what_a_program_read_is_gone_when_it_has_run(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless backward may run again. Here it is the block's argument, which no node saves in bf16: it is cast first."""
    model = LLAMA.build(dtype=torch.bfloat16)
    attach(model)
    warm_up(LLAMA, model)
    counts: list[tuple[int, int]] = []
    rebuild = Stage.rebuild

    def watch(stage: Stage) -> None:
        read = [weakref.ref(source.tensor) for source in stage.sources or () if isinstance(source, Kept)]
        rebuild(stage)
        counts.append((len(read), sum(ref() is not None for ref in read)))

    monkeypatch.setattr(Stage, "rebuild", watch)
    with collector_off():
        loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
        loss.backward(retain_graph=True)
        retained = counts[:]
        counts.clear()
        loss.backward()
    assert [read for read, _ in counts] == [read for read, _ in retained]
    assert sum(read for read, _ in counts) > 0
    assert all(left == read for read, left in retained)
    assert all(left == 0 for _, left in counts)


def test_r6_the_mlp_part_is_gone_before_the_attention_part_is_rebuilt(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLAMA.build()
    runtime = attach(model)
    warm_up(LLAMA, model)
    graph = plans.graphs_of(runtime)[0]
    assert graph.stages == 2
    order: list[int] = []
    alive: list[int] = []
    rebuilt: list[weakref.ref[torch.Tensor]] = []
    receive = Stage._receive

    def watch(stage: Stage, results: tuple[torch.Tensor, ...]) -> None:
        order.append(graph.slots[stage.program.slots[0]].stage)
        alive.append(sum(ref() is not None for ref in rebuilt))
        rebuilt[:] = [weakref.ref(tensor) for tensor in results[: len(stage.program.slots)]]
        receive(stage, results)

    monkeypatch.setattr(Stage, "_receive", watch)
    LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0)).backward()
    assert order == [0, 1] * 3
    assert alive == [0] * 6
    first, second = (program.ops for program in runtime.everything(graph).programs if program is not None)
    assert "mlp.gate_proj" in first
    assert "self_attn.sdpa" in first, "the residual stream needs attention's output: the first stage computes it"
    assert not [op for op in second if op.startswith("mlp.")]


def test_r7_what_forward_decided_backward_undoes(attach: Attach) -> None:
    model, reference = LLAMA.build(dtype=torch.bfloat16), LLAMA.build(dtype=torch.bfloat16)
    runtime = attach(model, _two_entries(attach, model))
    short, long = LLAMA.make_inputs(1, 10, seed=0), LLAMA.make_inputs(3, 17, seed=1)
    for inputs in (short, long):
        LLAMA.gradients(model, inputs)  # both entries have had their trial
    model.zero_grad(set_to_none=True)
    uses = lambda: [use.frames for use in runtime.report().entries]  # noqa: E731
    with runtime.microbatch(tokens=60):  # not what would be counted
        first = LLAMA.loss(model, short)
    assert uses() == [3, 6]
    with runtime.microbatch(tokens=10):
        second = LLAMA.loss(model, long)
        first.backward()
    assert uses() == [6, 6]
    with runtime.microbatch(tokens=1000):
        second.backward()
    assert uses() == [6, 6]
    reference.zero_grad()
    first, second = LLAMA.loss(reference, short), LLAMA.loss(reference, long)
    first.backward()
    second.backward()
    _assert_same_gradients(model, reference)


def _two_entries(attach: Attach, model: nn.Module) -> plans.Plan:
    """Up to 16 tokens everything is stored; beyond, units are narrowed or recomputed."""
    store, cast = (attach.actions(LLAMA, choice, model) for choice in (plans.store, plans.cast))
    entries = (*plans.make_plan(model, store, (16,)).entries, *plans.make_plan(model, cast, (64,)).entries)
    return plans.make_plan(model).model_copy(update={"entries": entries})


def _assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    got, want = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference))
    assert_bit_equal(got, want)


def test_r8_tokens_are_counted_in_the_blocks_own_input(attach: Attach) -> None:
    model = LLAMA.build(dtype=torch.bfloat16)
    runtime = attach(model, _two_entries(attach, model))
    LLAMA.gradients(model, LLAMA.make_inputs(2, 8, seed=0))
    assert [use.frames for use in runtime.report().entries] == [3, 0]
    LLAMA.gradients(model, LLAMA.make_inputs(2, 9, seed=0))
    assert [use.frames for use in runtime.report().entries] == [3, 3]


def test_r8_the_exposure_counts_as_the_highest_where_nobody_says_otherwise(attach: Attach) -> None:
    model = PLAIN.build()
    plan = plans.make_plan(model)
    entries = tuple(plan.entries[0].model_copy(update={"exposure_up_to": upper}) for upper in (0.5, 2.0, None))
    runtime = attach(model, plan.model_copy(update={"entries": entries}))
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    PLAIN.gradients(model, inputs)
    with runtime.microbatch(tokens=18):
        PLAIN.gradients(model, inputs)
    with runtime.microbatch():
        PLAIN.gradients(model, inputs)
    assert [use.frames for use in runtime.report().entries] == [0, 0, 9]
    with runtime.microbatch(exposure=0.1):  # tokens counted, exposure given
        PLAIN.gradients(model, inputs)
    with runtime.microbatch(tokens=18, exposure=0.6):
        PLAIN.gradients(model, inputs)
    assert [use.frames for use in runtime.report().entries] == [3, 3, 9]


def test_r8_more_tokens_than_the_plan_knows_recompute_everything(attach: Attach, handles: HandleLog) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach.chosen(PLAIN, plans.store, model, tokens=(16,))
    for length in (8, 9):
        inputs = PLAIN.make_inputs(2, length, seed=0)
        PLAIN.gradients(model, inputs)
        handles.clear()
        loss = PLAIN.loss(model, inputs)
        rebuilt = sum(isinstance(handle.owner, Stage) for handle in handles.handles)
        assert bool(rebuilt) == (length == 9)
        del loss
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))
    assert runtime.report().beyond_the_plan == 9


def test_r8_what_one_microbatch_said_is_over_at_its_end(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = attach(model, plans.make_plan(model, tokens=(16, 1000)))
    with runtime.microbatch(tokens=10), pytest.raises(ZeroDivisionError), runtime.microbatch(tokens=500):
        raise ZeroDivisionError
    PLAIN.gradients(model, PLAIN.make_inputs(1, 9, seed=0))
    assert [use.frames for use in runtime.report().entries] == [3, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_r9_forwards_without_gradients_pass_through(
    mode: Callable[[], torch.no_grad], attach: Attach, handles: HandleLog
) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    with mode():
        assert torch.equal(model(**inputs), reference(**inputs))
    model.eval()
    model(**inputs).sum().backward()
    assert not handles.handles
    report = runtime.report()
    assert (report.frames, report.passed_through) == (0, 6)


def test_r9_an_exception_in_forward_leaves_no_hook(attach: Attach) -> None:
    class Fails(Plain):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if Fails.fail:
                raise ZeroDivisionError
            return y

    model = stack(Fails)
    attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    want = PLAIN.gradients(model, inputs)
    with collector_off():
        for _ in range(2):
            Fails.fail = True
            with pytest.raises(ZeroDivisionError):
                model(**inputs)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert live_frames() == 0
            Fails.fail = False
            assert_bit_equal(PLAIN.gradients(model, inputs), want)


def test_r9_hooks_keys_and_classes_are_not_touched(attach: Attach) -> None:
    model = LLAMA.build()
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    hooks = [_hooks(module) for module in model.modules()]
    runtime = attach(model)
    warm_up(LLAMA, model)
    for _ in range(2):
        assert list(model.state_dict()) == keys
        assert [type(module) for module in model.modules()] == classes
        assert [_hooks(module) for module in model.modules()] == hooks
        runtime.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def _hooks(module: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}


class LooksAtValues(Plain):
    """Its path depends on data: no graph holds both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(torch.tanh(h) if h.sum().item() > 0 else torch.sigmoid(h))


def test_r10_what_cannot_be_captured_is_checkpointed_with_one_warning(attach: Attach) -> None:
    model, reference = stack(LooksAtValues, depth=2), stack(LooksAtValues, depth=2)
    runtime = attach(model)
    with pytest.warns(HiloreWarning, match=r"block layers\.\d.*cannot be captured.*checkpointed") as caught:
        assert_plan_is_exact(PLAIN, runtime, model, reference, steps=3)
    assert len(caught) == 2  # one a block
    report = runtime.report()
    assert set(report.fallbacks) == {"layers.0", "layers.1"}
    assert all("checkpointed" in text for text in report.fallbacks.values())
    assert report.frames == 0


class _Drifts(torch.autograd.Function):
    """Gives another result each time, which nothing in its graph shows."""

    calls = 0

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return drift(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad


@torch.library.custom_op("hilore_tests::drift", mutates_args=())
def drift(x: torch.Tensor) -> torch.Tensor:
    _Drifts.calls += 1
    return x + 0.001 * _Drifts.calls


@drift.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Drifting(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(_Drifts.apply(self.up(self.norm(x)))))


def test_r10_a_value_that_does_not_come_back_is_stored_from_then_on(attach: Attach) -> None:
    model, reference = stack(Drifting, depth=1), stack(Drifting, depth=1)
    runtime = attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)

    def gradients(of: nn.Module) -> dict[str, torch.Tensor]:
        _Drifts.calls = 0
        return PLAIN.gradients(of, inputs)

    want = gradients(reference)
    with pytest.warns(HiloreWarning, match=r"layers\.0: .*sigmoid.* did not come back bit for bit") as caught:
        got = [gradients(model) for _ in range(3)]
    assert len(caught) == 1
    for each in got:
        assert_bit_equal(each, want)
    stored: list[str] = runtime.report().stored_instead["layers.0"]
    assert any("sigmoid" in unit for unit in stored)
    assert not any("norm" in unit for unit in stored)


def test_r10_a_graph_that_the_block_does_not_follow_is_given_up(attach: Attach) -> None:
    class Moody(Plain):
        """Goes another way by a state that no signature shows."""

        mood = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))
            return x + self.down(torch.tanh(h) if Moody.mood else torch.sin(h).cos())

    model, reference = stack(Moody, depth=1), stack(Moody, depth=1)
    runtime = attach(model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    model(**inputs)  # captures the sine
    second = attach_again(runtime, model, attach)
    Moody.mood = True
    for _ in range(3):
        assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))
    assert second.report().frames == 3
    Moody.mood = False
    with pytest.raises(RecoveryError, match="its graph says"):  # after the trial it is an error, not a wrong number
        model(**inputs)


def attach_again(runtime: Runtime, model: nn.Module, attach: Attach) -> Runtime:
    """A runtime whose blocks have had no trial, with the graphs of the first."""
    runtime.detach()
    return attach(model)


def test_frames_count_only_what_a_plan_rebuilds(attach: Attach) -> None:
    """The rules above lean on `live_frames`: it counts stages in flight, and they go with their loss."""
    model = stack(Plain)
    attach(model)
    warm_up(PLAIN, model)
    loss = PLAIN.loss(model, PLAIN.make_inputs(2, 9, seed=0))
    assert live_frames() >= 3
    del loss
    assert live_frames() == 0
    assert model.embedding.embedding_dim == WIDTH
