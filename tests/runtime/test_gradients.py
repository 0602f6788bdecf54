"""Which entry a forward gets by the gradients that it finds: those of micro-batches before it, or none at all."""

from __future__ import annotations

from collections.abc import Callable

import plans
import pytest
import torch
from runtime.rig import LLAMA, PLAIN, Attach, assert_bit_equal, warm_up
from torch import nn

from hilore_plan.runtime.attach import Runtime
from hilore_plan.runtime.gradients import Gradients
from hilore_plan.runtime.lookup import Lookup
from hilore_plan.schema.plan import Plan

INPUTS = PLAIN.make_inputs(2, 9, seed=0)


def split(model: nn.Module, none: plans.Plan, live: plans.Plan) -> Plan:
    """The entries of one plan for micro-batches without gradients, those of another for all others."""
    entries = tuple(entry.model_copy(update={"gradients": "none"}) for entry in none.entries)
    return plans.make_plan(model).model_copy(update={"entries": (*entries, *live.entries)})


def splitting(attach: Attach, model: nn.Module) -> Runtime:
    """Everything is stored without gradients, and recomputed with them."""
    store = plans.make_plan(model, attach.actions(PLAIN, plans.store, model))
    runtime = attach(model, split(model, store, plans.make_plan(model)))
    warm_up(PLAIN, model)
    return runtime


def used(runtime: Runtime, run: Callable[[], object]) -> list[int]:
    """The frames that each entry got while something ran."""
    before = [use.frames for use in runtime.report().entries]
    run()
    return [use.frames - earlier for use, earlier in zip(runtime.report().entries, before, strict=True)]


def test_the_first_micro_batch_after_zero_grad_has_its_own_entry(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = splitting(attach, model)
    backward = lambda: PLAIN.loss(model, INPUTS).backward()  # noqa: E731
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        assert used(runtime, backward) == [3, 0]
        assert used(runtime, backward) == [0, 3]
        assert used(runtime, backward) == [0, 3]
    model.zero_grad(set_to_none=False)
    assert used(runtime, backward) == [0, 3], "zeros take as much memory as any gradient"


def test_what_is_said_of_a_micro_batch_does_not_settle_it_before_forward(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = splitting(attach, model)
    model.zero_grad(set_to_none=True)

    def two_in_one() -> None:
        with runtime.microbatch(tokens=18):
            PLAIN.loss(model, INPUTS).backward()
            PLAIN.loss(model, INPUTS).backward()

    assert used(runtime, two_in_one) == [3, 3]
    before = runtime.microbatch(tokens=18)
    model.zero_grad(set_to_none=True)

    def entered_late() -> None:
        with before:
            PLAIN.loss(model, INPUTS).backward()

    assert used(runtime, entered_late) == [3, 0]


def test_a_single_gradient_anywhere_counts(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = splitting(attach, model)
    for parameter in list(model.parameters()):
        model.zero_grad(set_to_none=True)
        parameter.grad = torch.zeros_like(parameter)
        with runtime.microbatch(tokens=18):
            assert used(runtime, lambda: PLAIN.loss(model, INPUTS)) == [0, 3]


def test_parameters_that_came_after_the_plan_are_looked_at_as_well() -> None:
    model = PLAIN.build()
    gradients = Gradients(model)
    assert gradients.state() == "none"
    model.late = nn.Parameter(torch.ones(2))
    model.late.grad = torch.ones(2)
    assert gradients.state() == "live"
    model.late.grad = None
    assert gradients.state() == "none"


def test_gradients_of_distributed_training_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Gradients(PLAIN.build())
    assert gradients.state() == "none"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert gradients.state() == "live"


def test_both_entries_are_exact_in_one_update(attach: Attach) -> None:
    model, reference = LLAMA.build(dtype=torch.bfloat16), LLAMA.build(dtype=torch.bfloat16)
    store, cast = (plans.make_plan(model, attach.actions(LLAMA, choice, model)) for choice in (plans.store, plans.cast))
    runtime = attach(model, split(model, store, cast))
    for update in range(2):
        for each in (model, reference):
            each.zero_grad(set_to_none=True)
            for micro_batch in range(3):
                LLAMA.loss(each, LLAMA.make_inputs(2, 9, seed=3 * update + micro_batch)).backward()
        got, want = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference))
        assert_bit_equal(got, want)
    assert [use.frames for use in runtime.report().entries] == [2 * 3, 4 * 3]
    assert "no gradients yet" in str(runtime.report())


def test_a_plan_that_does_not_tell_them_apart_looks_at_no_gradient(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gradients, "state", lambda _: pytest.fail("looked"))
    model = PLAIN.build()
    runtime = attach(model)
    warm_up(PLAIN, model)
    assert runtime.report().frames > 0


def test_sizes_that_have_no_entry_without_gradients_get_the_other_one() -> None:
    model = PLAIN.build()
    few, more = plans.make_plan(model, tokens=(100,)), plans.make_plan(model, tokens=(100, 200))
    lookup = Lookup(split(model, few, more))
    assert [lookup.find(tokens, None, "none") for tokens in (50, 100, 101, 201)] == [0, 0, 2, None]
    assert [lookup.find(tokens, None, "live") for tokens in (50, 100, 101, 201)] == [1, 1, 2, None]
    assert [lookup.find(tokens, None) for tokens in (50, 101)] == [1, 2]


def test_buckets_of_exposure_are_those_of_the_same_gradients() -> None:
    model = PLAIN.build()
    one = plans.make_plan(model)
    buckets = [one.entries[0].model_copy(update={"exposure_up_to": upper}) for upper in (0.5, None)]
    both = one.model_copy(update={"entries": tuple(buckets)})
    lookup = Lookup(split(model, both, both))
    assert [lookup.find(1, exposure, "none") for exposure in (0.1, 0.7, None)] == [0, 1, 1]
    assert [lookup.find(1, exposure, "live") for exposure in (0.1, 0.7, None)] == [2, 3, 3]
    assert [lookup.has_riskier(entry) for entry in range(4)] == [True, False, True, False]
    assert lookup.is_riskier(0.7, 0)
    assert not lookup.is_riskier(0.7, 1)
