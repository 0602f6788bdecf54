"""Compressed units: near the exact gradient, exactly it where a micro-batch turns out riskier than planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plans
import pytest
import tolerances
import torch
from models import Case
from runtime.rig import LLAMA, PLAIN, Attach, HandleLog, assert_bit_equal, collector_off, live_tensors, warm_up
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.runtime.alarm import Careful
from hilore_plan.runtime.attach import Runtime
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.frame import Handle, Stage, live_frames, unpack
from hilore_plan.runtime.kept import Compressed
from hilore_plan.runtime.meter import LEAST, WINDOW, Meter
from hilore_plan.runtime.recipe import Recipe

CASES = [PLAIN, LLAMA]
EDGE = 1.0
# steps from zero to the largest element; fp8 has 3 bits of mantissa below each power of two
LEVELS = {"int8": 127, "int8_asym": 127, "fp8_e4m3": 16, "int4": 7}


def two_buckets(attach: Attach, case: Case, model: nn.Module, codec: str = "int8", *, limit: float = 0.015) -> Runtime:
    """Everything compressed up to the mean exposure, everything recomputed above it; the mean is known, and 1."""
    low = attach.actions(case, plans.compress(codec), model)
    high = attach.actions(case, lambda value: "recompute", model)
    plan = plans.by_exposure(plans.make_plan(model), (EDGE, 0.01, low), (None, 0.0, high), limit=limit)
    runtime = attach(model, plan)
    runtime.meter.seen, runtime.meter.mean = LEAST, 1.0
    return runtime


def log_probs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**inputs)
    logits = (output if isinstance(output, torch.Tensor) else output.logits)[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)


def unit(shape: tuple[int, ...], norm: float) -> torch.Tensor:
    """Coefficients of both signs with the given L2 norm."""
    signs = 1.0 - 2.0 * (torch.arange(shape[0] * shape[1]) % 2).view(shape)
    return signs * norm / signs.norm()


def gradients(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    exact: torch.Tensor,
    runtime: Runtime | None = None,
    said: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One micro-batch; with a runtime, which is told the coefficients `said` and sees the `exact` ones in backward."""
    model.zero_grad(set_to_none=True)
    if runtime is None:
        loss = (log_probs(model, inputs) * exact).sum()
    else:
        with runtime.microbatch(coefficients=exact if said is None else said) as micro_batch:
            logps = log_probs(model, inputs)
            micro_batch.observe(logps)
            loss = (logps * exact).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    difference = sum(float((got[name] - want[name]).double().square().sum()) for name in want)
    return float((difference / sum(float(g.double().square().sum()) for g in want.values())) ** 0.5)


def compressed_units(runtime: Runtime) -> int:
    """Units that each block of a runtime compresses."""
    graph = next(iter(runtime._blocks[0].stored))
    return len(Recipe(graph, runtime._actions.of(0, 0)).codecs)


@pytest.mark.parametrize("codec", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gradient_is_near_the_exact_one_and_not_equal_to_it(attach: Attach, case: Case, codec: str) -> None:
    model, reference = case.build(), case.build()
    runtime = two_buckets(attach, case, model, codec)
    warm_up(case, model)
    inputs = case.make_inputs(2, 9, seed=1)
    coefficients = unit((2, 8), 0.5)
    got = gradients(model, inputs, coefficients, runtime, coefficients)
    error = relative_error(got, gradients(reference, inputs, coefficients))
    assert 0 < error < tolerances.compressed_gradient(LEVELS[codec], compressed_units(runtime))
    assert runtime.escalations == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_r11_a_riskier_micro_batch_is_rebuilt_exactly(attach: Attach, case: Case) -> None:
    model, reference = case.build(), case.build()
    runtime = two_buckets(attach, case, model)
    warm_up(case, model)
    for seed in range(2):
        inputs = case.make_inputs(2, 9 + seed, seed=seed)
        exact = unit((2, 8 + seed), 1.5)
        got = gradients(model, inputs, exact, runtime, exact / 3)
        assert_bit_equal(got, gradients(reference, inputs, exact))
    assert runtime.escalations == 2
    assert runtime.report().escalations == 2
    assert runtime.report().expected_error == 0.0
    assert live_frames() == 0


@pytest.mark.parametrize("raised", [False, True], ids=["as planned", "exactly"])
def test_r11_the_first_request_lets_go_of_what_only_the_other_way_reads(
    raised: bool, attach: Attach, handles: HandleLog
) -> None:
    model = LLAMA.build()
    low = {"mlp.gate_proj": "compress:int8", "mlp.up_proj": "compress:int8"}  # the rest is rebuilt, in stages
    plan = plans.make_plan(model)
    runtime = attach(model, plans.by_exposure(plan, (EDGE, 0.01, [low] * 3), (None, 0.0, [{}] * 3), limit=0.015))
    warm_up(LLAMA, model)
    handles.clear()
    with runtime.microbatch(exposure=0.0) as micro_batch:
        loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
    frames = [handle for handle in handles.handles if isinstance(handle.owner, Careful)]
    last = frames[-len(frames) // 3 :]
    ways = {True: stages_of(last, exact=True), False: stages_of(last, exact=False)}
    assert ways[True]
    assert ways[False]
    assert micro_batch.alarm is not None
    micro_batch.alarm.raised = raised
    unpack(last[-1])
    assert all(stage.spent and not stage.sources for stage in ways[not raised])
    assert not any(stage.spent for stage in ways[raised])
    loss.backward()  # type: ignore[no-untyped-call]


def stages_of(handles: Sequence[Handle], *, exact: bool) -> set[Stage]:
    """The stages of one of a frame's two ways."""
    owners = [handle.owner for handle in handles if isinstance(handle.owner, Careful)]
    return {way for owner in owners if isinstance(way := owner.exact if exact else owner.owner, Stage)}


def test_the_very_first_frame_can_be_rebuilt_exactly(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = two_buckets(attach, LLAMA, model)
    inputs, exact = LLAMA.make_inputs(2, 9, seed=0), unit((2, 8), 2.0)
    got = gradients(model, inputs, exact, runtime, exact / 4)
    assert_bit_equal(got, gradients(reference, inputs, exact))
    assert runtime.escalations == 1


def test_the_highest_bucket_is_used_as_it_is(attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model)
    warm_up(PLAIN, model)
    inputs, exact = PLAIN.make_inputs(2, 9, seed=0), unit((2, 8), 2.0)
    got = gradients(model, inputs, exact, runtime, exact)
    assert_bit_equal(got, gradients(reference, inputs, exact))
    assert runtime.escalations == 0


def test_without_a_word_a_micro_batch_counts_as_the_riskiest(attach: Attach) -> None:
    model, reference = PLAIN.build(), PLAIN.build()
    two_buckets(attach, PLAIN, model)
    warm_up(PLAIN, model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    assert_bit_equal(PLAIN.gradients(model, inputs), PLAIN.gradients(reference, inputs))


def test_exposures_count_as_the_riskiest_until_their_mean_is_known(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model)
    runtime.meter = Meter()
    inputs, low = PLAIN.make_inputs(2, 9, seed=0), unit((2, 8), 0.5)
    for number in range(LEAST + 1):
        with runtime.microbatch(tokens=18, coefficients=low) as micro_batch:
            log_probs(model, inputs)
        assert micro_batch.entry == (1 if number < LEAST else 0)


def test_a_run_of_other_exposures_than_calibrated_keeps_the_budget(attach: Attach) -> None:
    """All micro-batches are of the lower bucket. A quarter of them may have its entry: 0.25 * 0.01^2 = 0.005^2."""
    model = PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model, limit=0.005)
    entries = []
    for _ in range(40):
        with runtime.microbatch(tokens=18, exposure=0.5) as micro_batch:
            entries.append(micro_batch.entry)
    assert entries[:6] == [0, 1, 1, 1, 0, 1]
    report = runtime.report()
    assert report.held_back == entries.count(1)
    assert 0.0045 < report.expected_error <= 0.005
    assert f"{report.held_back} micro-batches got a more careful entry" in str(report)
    with runtime.microbatch(tokens=18, exposure=0.5) as micro_batch:
        assert micro_batch.entry == 0
    assert runtime.over_budget
    with runtime.microbatch(tokens=18, exposure=0.0) as silent:
        assert silent.entry == 0  # without coefficients there is no gradient to err
    with runtime.microbatch(tokens=18, exposure=2.0) as risky:
        assert risky.entry == 1
    assert runtime.report().held_back == report.held_back  # that is the entry it has anyway


def test_what_was_left_of_the_budget_long_ago_is_not_spent_later() -> None:
    meter = Meter()
    for _ in range(10 * WINDOW):
        meter.count(1.0, 0.0)
    for _ in range(WINDOW):
        meter.count(1.0, 0.01)
    assert meter.expected_error < 0.005
    assert meter.errs_more_than(0.007)  # of the window, 1 - 1/e have the error 0.01
    assert not meter.errs_more_than(0.009)


def test_advantages_give_the_exposure_that_their_coefficients_have(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 8)
    with runtime.microbatch(advantages=advantages, mask=mask, loss="dapo") as micro_batch:
        pass
    # on-policy each coefficient is -A / N: the norm is sqrt(N) / N
    assert micro_batch.absolute == pytest.approx(16**-0.5)


def test_the_true_error_is_that_of_the_compressed_gradient(attach: Attach) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    runtime = two_buckets(attach, LLAMA, model)
    warm_up(LLAMA, model)
    inputs, coefficients = LLAMA.make_inputs(2, 9, seed=1), unit((2, 8), 0.5)
    exact = gradients(reference, inputs, coefficients)
    plain = gradients(model, inputs, coefficients, runtime, coefficients)
    with runtime.microbatch(coefficients=coefficients, check=True) as micro_batch:
        loss = (log_probs(model, inputs) * coefficients).sum()
        error = micro_batch.true_error(loss, list(model.parameters()))
    loss.backward()  # type: ignore[no-untyped-call]
    assert error == pytest.approx(relative_error(plain, exact), rel=1e-6)
    assert_bit_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, plain)
    assert live_frames() == 0


def test_the_true_error_of_an_exact_entry_is_zero(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model)
    warm_up(PLAIN, model)
    inputs, coefficients = PLAIN.make_inputs(2, 9, seed=1), unit((2, 8), 5.0)
    with runtime.microbatch(coefficients=coefficients, check=True) as micro_batch:
        loss = (log_probs(model, inputs) * coefficients).sum()
        assert micro_batch.true_error(loss, list(model.parameters())) == 0.0


def test_a_value_with_several_slots_is_encoded_once(attach: Attach, handles: HandleLog) -> None:
    model = LLAMA.build()
    runtime = two_buckets(attach, LLAMA, model)
    warm_up(LLAMA, model)
    handles.clear()
    with runtime.microbatch(exposure=0.1):
        loss = LLAMA.loss(model, LLAMA.make_inputs(2, 9, seed=0))
    owners = [handle.owner for handle in handles.handles]
    compressed = [owner.owner for owner in owners if isinstance(owner, Careful) and isinstance(owner.owner, Compressed)]
    blocks = len(runtime._blocks)
    assert len({id(owner) for owner in compressed}) == blocks * compressed_units(runtime) < len(compressed)
    loss.backward()  # type: ignore[no-untyped-call]


def test_memory_does_not_grow_with_the_collector_off(attach: Attach) -> None:
    model = LLAMA.build()
    runtime = two_buckets(attach, LLAMA, model)
    inputs, low, high = LLAMA.make_inputs(2, 9, seed=0), unit((2, 8), 0.5), unit((2, 8), 3.0)

    def steps(count: int) -> None:
        for number in range(count):
            gradients(model, inputs, high if number % 3 == 0 else low, runtime, low)
            runtime.meter.mean = 1.0

    with collector_off():
        steps(3)
        before = live_tensors()
        steps(50)
        assert live_tensors() <= before
    assert live_frames() == 0


def test_what_a_codec_refuses_is_stored_with_one_warning(attach: Attach) -> None:
    model, reference = PLAIN.build(dtype=torch.float64), PLAIN.build(dtype=torch.float64)
    actions = attach.actions(PLAIN, lambda value: "store" if value.kind == "input" else "compress:int8", model)
    runtime = attach(model, plans.make_plan(model, actions))
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    with pytest.warns(HiloreWarning, match=r"cannot be compressed .*: stored instead"):
        got = PLAIN.gradients(model, inputs)
    want = PLAIN.gradients(reference, inputs)
    assert_bit_equal(got, want)
    assert_bit_equal(PLAIN.gradients(model, inputs), want)
    assert all(runtime.report().stored_instead.values())


@pytest.mark.parametrize("first", [0.1, 9.0], ids=["compressed", "exact"])
def test_an_attention_mask_is_stored_instead_since_no_codec_holds_its_infinities(attach: Attach, first: float) -> None:
    model, reference = LLAMA.build(), LLAMA.build()
    inputs = LLAMA.make_inputs(2, 9, seed=0, padding=True)
    mask: list[dict[str, plans.Action]] = [{"self_attn.where": "compress:int8"}] * 3
    runtime = attach(model, plans.by_exposure(plans.make_plan(model), (1.0, 0.01, mask), (None, 0.0, [{}] * 3)))
    with (
        runtime.microbatch(exposure=first),
        pytest.warns(HiloreWarning, match=r"where cannot be compressed \(it holds numbers"),
    ):
        got = LLAMA.gradients(model, inputs)
    want = LLAMA.gradients(reference, inputs)
    assert_bit_equal(got, want)
    with runtime.microbatch(exposure=0.1):
        assert_bit_equal(LLAMA.gradients(model, inputs), want)
    assert list(runtime.report().stored_instead.values()) == [["self_attn.where"]] * 3


def test_a_micro_batch_of_unknown_exposure_counts_in_the_expected_error(attach: Attach) -> None:
    model = PLAIN.build()
    actions = attach.actions(PLAIN, plans.compress("int8"), model)
    runtime = attach(model, plans.by_exposure(plans.make_plan(model), (None, 0.01, actions)))
    assert runtime.report().expected_error == 0.0
    for _ in range(2):
        with runtime.microbatch(tokens=18):
            PLAIN.gradients(model, PLAIN.make_inputs(2, 9, seed=0))
    assert runtime.report().expected_error == pytest.approx(0.01)


def test_forwards_outside_any_micro_batch_count_in_the_expected_error(attach: Attach) -> None:
    model = PLAIN.build()
    actions = attach.actions(PLAIN, plans.compress("int8"), model)
    runtime = attach(model, plans.by_exposure(plans.make_plan(model), (None, 0.01, actions)))
    PLAIN.gradients(model, PLAIN.make_inputs(2, 9, seed=0))
    assert runtime.report().expected_error == pytest.approx(0.01)


@pytest.mark.parametrize(
    "mistake",
    [
        {"exposure": 0.5, "coefficients": torch.ones(2, 2)},
        {"coefficients": torch.ones(2, 2), "advantages": torch.ones(2)},
        {"advantages": torch.ones(2)},
        {"coefficients": torch.tensor([[float("nan")]])},
    ],
)
def test_what_does_not_fit_together_is_refused(attach: Attach, mistake: dict[str, Any]) -> None:
    runtime = two_buckets(attach, PLAIN, PLAIN.build())
    with pytest.raises(UsageError):
        runtime.microbatch(**mistake)


def test_a_plain_exposure_cannot_be_checked(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model)
    with runtime.microbatch(exposure=0.5) as micro_batch, pytest.raises(UsageError, match="cannot be checked"):
        micro_batch.observe(torch.ones(1, requires_grad=True))


def test_the_report_says_the_expected_error_beside_its_budget(attach: Attach) -> None:
    model = PLAIN.build()
    runtime = two_buckets(attach, PLAIN, model)
    inputs = PLAIN.make_inputs(2, 9, seed=0)
    for coefficients in (unit((2, 8), 0.6), unit((2, 8), 0.8)):
        gradients(model, inputs, coefficients, runtime, coefficients)
    gradients(model, inputs, unit((2, 8), 3.0), runtime, unit((2, 8), 3.0))
    report = runtime.report()
    assert report.expected_error == pytest.approx((0.01**2 * (0.36 + 0.64) / (0.36 + 0.64 + 9.0)) ** 0.5)
    assert report.error_budget == 0.015
    assert "expected gradient error 0.0032, budget 0.0150" in str(report)
