"""torch.compile and a plan: refused by name wherever it takes in planned blocks, beside them it does no harm.

In no case does a compiled model train with its plan passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import plans
import pytest
import torch
from models import Case
from runtime.rig import PLAIN, Attach, assert_bit_equal, warm_up
from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.block import HiloreWarning

pytestmark = [
    pytest.mark.setups,
    # torch 2.13 warns of what it imports itself, and of the gradients that it looks for where it compiles
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

INPUTS = PLAIN.make_inputs(2, 9, seed=0)
Compile = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


WAYS = {"torch.compile": wrapped, "module.compile": in_place}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Inside(nn.Module):
    """A model that is a part of another."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.policy(**inputs)
        return result


# before the plan


@ways
def test_a_compiled_model_is_refused(way: Compile) -> None:
    model = PLAIN.build()
    plan = plans.make_plan(model)
    compiled = way(model)
    with pytest.raises(RefusedError, match=r"is compiled by torch\.compile, with the planned blocks in it") as caught:
        apply(compiled, plan)
    assert "train without torch.compile on what holds the blocks" in caught.value.hint
    assert not any("forward" in vars(module) for module in model.modules())


@ways
def test_a_compiled_part_that_holds_the_blocks_is_refused_by_name(way: Compile) -> None:
    model = Inside(PLAIN.build())
    plan = plans.make_plan(model)
    model.policy = way(model.policy)
    with pytest.raises(RefusedError, match=r" policy is compiled by torch\.compile"):
        apply(model, plan)


@ways
def test_a_compiled_block_is_refused_by_name(way: Compile) -> None:
    model = PLAIN.build()
    plan = plans.make_plan(model)
    model.layers[1] = way(model.layers[1])
    names = [f"layers.{i}" for i in range(3)]
    with pytest.raises(RefusedError, match=r"block layers\.1 is compiled by torch\.compile"):
        apply(model, plan, blocks=names)


def test_the_plain_model_behind_a_compiled_one_trains_and_the_compiled_one_is_refused(attach: Attach) -> None:
    """Also if it was traced before the plan came: what torch has compiled until then is not run any more."""
    model, reference = PLAIN.build(), PLAIN.build()
    compiled = wrapped(model)
    PLAIN.gradients(compiled, INPUTS)
    runtime = attach(model)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"layers\.0 is compiled by torch\.compile, or is a part"):
            PLAIN.gradients(compiled, INPUTS)
        assert_bit_equal(PLAIN.gradients(model, INPUTS), PLAIN.gradients(reference, INPUTS))
    assert runtime.report().frames == 6
    runtime.detach()
    got = {name.removeprefix("_orig_mod."): g for name, g in PLAIN.gradients(compiled, INPUTS).items()}
    assert_bit_equal(got, PLAIN.gradients(reference, INPUTS))


# after the plan


@ways
def test_a_model_compiled_later_is_refused_at_its_first_forward(way: Compile, attach: Attach) -> None:
    model = PLAIN.build()
    runtime = attach(model)
    warm_up(PLAIN, model)
    frames = runtime.report().frames
    compiled = way(model)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"block layers\.0 is compiled by torch\.compile, or is a part"):
            PLAIN.gradients(compiled, INPUTS)
    report = runtime.report()
    assert (report.frames, report.passed_through) == (frames, 0)


@ways
def test_a_block_compiled_later_is_refused_at_its_next_forward(way: Compile, attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    warm_up(PLAIN, model)
    model.layers[1] = way(model.layers[1])
    with pytest.raises(RefusedError, match=r"block layers\.1 is compiled by torch\.compile"):
        PLAIN.gradients(model, INPUTS)


def test_a_compiled_model_that_torch_has_given_up_on_is_refused(attach: Attach) -> None:
    """Past its limit of recompilations torch runs a frame in Python, and goes on with the frames that it calls."""
    model = PLAIN.build()
    runtime = attach(model)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in range(4, 9):
            with pytest.raises(RefusedError, match=r"block layers\.0 is compiled by torch\.compile"):
                PLAIN.gradients(compiled, PLAIN.make_inputs(2, length, seed=0))
    assert runtime.report().frames == 0


def test_a_compiled_training_step_is_refused(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)

    @torch.compile(backend="eager")
    def step(inputs: dict[str, torch.Tensor]) -> None:
        PLAIN.loss(model, inputs).backward()

    with pytest.raises(RefusedError, match=r"block layers\.0 is compiled by torch\.compile"):
        step(INPUTS)


def test_where_torch_must_compile_all_or_nothing_its_own_error_says_what_is_planned(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"hilore: block layers\.0 has a plan(?s:.*)without torch\.compile"):
        PLAIN.gradients(compiled, INPUTS)


def test_exporting_a_model_that_trains_is_refused(attach: Attach) -> None:
    model = PLAIN.build()
    attach(model)
    with pytest.raises(RefusedError, match=r"block layers\.0"):
        torch.export.export(model, (), dict(INPUTS), strict=False)
    torch.export.export(model.eval(), (), dict(INPUTS), strict=False)


# inside a block


def activation_of_its_own(layer: nn.Module) -> None:
    """The block's own forward calls a compiled function."""
    squash = torch.compile(lambda x: torch.nn.functional.gelu(x), backend="aot_eager")  # noqa: PLW0108 - not a builtin
    layer.forward = lambda x: x + layer.down(squash(layer.up(layer.norm(x))))  # type: ignore[method-assign, operator]


def part_in_place(layer: nn.Module) -> None:
    layer.up.compile(backend="aot_eager")  # type: ignore[operator]


def part_wrapped(layer: nn.Module) -> None:
    layer.up = torch.compile(layer.up, backend="aot_eager")


PARTS = {"in_place": part_in_place, "wrapped": part_wrapped}


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_block_with_a_compiled_part_is_checkpointed_with_a_warning_that_names_it(
    part: Callable[[nn.Module], None], later: bool, attach: Attach
) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    plan = plans.make_plan(model)
    if not later:
        part(model.layers[1])
        plan = plans.make_plan(model)
    runtime = attach(model, plan)
    if later:
        warm_up(PLAIN, model)
        part(model.layers[1])
    part(reference.layers[1])
    with pytest.warns(
        HiloreWarning, match=r"block layers\.1: cannot be captured .*torch\.compile has compiled"
    ) as caught:
        got = PLAIN.gradients(model, INPUTS)
    assert len(caught) == 1
    want = PLAIN.gradients(reference, INPUTS)
    assert_bit_equal(got, want)
    assert_bit_equal(PLAIN.gradients(model, INPUTS), want)
    assert list(runtime.report().fallbacks) == ["layers.1"]


def test_a_block_that_calls_a_compiled_function_is_checkpointed(attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    for each in (model, reference):
        activation_of_its_own(each.layers[2])
    runtime = attach(model)
    with pytest.warns(HiloreWarning, match=r"block layers\.2: cannot be captured .*torch\.compile has compiled"):
        got = PLAIN.gradients(model, INPUTS)
    for each in (got, PLAIN.gradients(model, INPUTS)):
        assert_bit_equal(each, PLAIN.gradients(reference, INPUTS))
    assert list(runtime.report().fallbacks) == ["layers.2"]


# beside the blocks


class Head(nn.Module):
    """A head with code of its own: what torch.nn has is not compiled alone."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(torch.tanh(x))
        return result


def test_a_compiled_head_and_a_compiled_loss_go_with_a_plan(attach: Attach) -> None:
    class Compiled(Case):
        def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = model(**inputs)
            value: torch.Tensor = squares(logits)
            return value

    @torch.compile(backend="aot_eager", fullgraph=True)
    def squares(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).square().mean()

    case = Compiled("compiled around", PLAIN.build)
    model, reference = PLAIN.build(), PLAIN.build()
    for each in (model, reference):
        each.head = torch.compile(Head(each.head), backend="aot_eager", fullgraph=True)
    runtime = attach.chosen(PLAIN, plans.seeded(5), model)
    for seed in range(2):
        inputs = PLAIN.make_inputs(2, 9, seed=seed)
        assert_bit_equal(case.gradients(model, inputs), case.gradients(reference, inputs))
    assert runtime.report().frames == 6


def test_a_compiled_model_may_generate_and_evaluate(attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(compiled(**INPUTS), reference(**INPUTS))
        compiled.eval()
        assert torch.equal(compiled(**INPUTS), reference(**INPUTS))
        compiled.train()
        assert_bit_equal(PLAIN.gradients(model, INPUTS), PLAIN.gradients(reference, INPUTS))
    assert runtime.report().frames == 6


def test_a_model_that_compiled_code_leaves_alone_keeps_its_plan(attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = attach(model)

    def stepper(model: nn.Module) -> Callable[[], torch.Tensor]:
        call = torch.compiler.disable(model)
        return torch.compile(lambda: call(**INPUTS).square().mean(), backend="eager")

    for each in (model, reference):
        stepper(each)().backward()  # type: ignore[no-untyped-call]
    assert_bit_equal(*({name: p.grad for name, p in each.named_parameters()} for each in (model, reference)))
    assert runtime.report().frames == 3


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_compiled_autograd_unpacks_what_hooks_have_packed(attach: Attach) -> None:
    from torch._dynamo import compiled_autograd

    model, reference = PLAIN.build(depth=1), PLAIN.build(depth=1)  # it traces for seconds in each block
    runtime = attach(model)
    warm_up(PLAIN, model)
    before = runtime.report().programs_run
    with compiled_autograd._enable(torch.compile(backend="eager")):
        got = PLAIN.gradients(model, INPUTS)
    assert_bit_equal(got, PLAIN.gradients(reference, INPUTS))
    assert runtime.report().programs_run > before
