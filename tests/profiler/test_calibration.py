"""Risk of tiny models: what is measured is what the model's gradient does, and the model comes back as it was."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hilore_plan.codecs.registry import find
from hilore_plan.errors import CodecError, UsageError
from hilore_plan.graph.blocks import find_blocks
from hilore_plan.integrations.builtin_models import LoadedModel, build
from hilore_plan.profiler.adapters import SHARE, perturbed_adapters
from hilore_plan.profiler.batches import (
    GROUP,
    CalibrationBatch,
    CalibrationData,
    CalibrationText,
    Sample,
    random_text,
    seeded_advantages,
    text_data,
)
from hilore_plan.profiler.calibrated import CalibratedClass, Pair
from hilore_plan.profiler.calibration import calibrate, compressing, split
from hilore_plan.profiler.calls import record_calls
from hilore_plan.profiler.classes import FoundClass, find_classes
from hilore_plan.profiler.error import Gradients, Recorded, parts_of, squared, squared_distance
from hilore_plan.profiler.fp32 import in_fp32
from hilore_plan.profiler.mixes import Joint, JointRuns, Slope, draw_mixes, fit_damping, predicted_squares
from hilore_plan.profiler.risk import BlockTests, _Sums
from hilore_plan.profiler.sketch import STRIDE, WHOLE, Sketch
from hilore_plan.profiler.step import MicroBatch, fused_loss
from hilore_plan.profiler.tape import Tape, taped
from hilore_plan.schema.profile import Risk

CPU = torch.device("cpu")
Place = tuple[int, Pair]


def small_text(loaded: LoadedModel, micro_batches: int = 8) -> CalibrationText:
    text = random_text(micro_batches, vocab_size=loaded.vocab_size, seed=3)
    return CalibrationText(
        tuple(Sample(s.prompt[:4], s.completion[:12], s.advantage) for s in text.samples), text.source
    )


def setting(loaded: LoadedModel) -> tuple[list[nn.Module], list[FoundClass], list[CalibrationBatch]]:
    data = text_data(small_text(loaded), CPU)
    blocks = [block for _, block in find_blocks(loaded.model)]
    classes = find_classes(blocks, record_calls(blocks, lambda: data.batches[0].loss(loaded.model)))
    return blocks, classes, data.batches


def calibrated(loaded: LoadedModel, codecs: tuple[str, ...] = ("int8", "int4")) -> Risk:
    blocks, classes, _ = setting(loaded)
    return calibrate(loaded.model, blocks, classes, text_data(small_text(loaded), CPU), codecs, mixes=4)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return all(now[name].dtype == t.dtype and torch.equal(now[name], t) for name, t in before.items())


@pytest.mark.parametrize(
    ("family", "dtype", "lora_rank"),
    [("llama", "bfloat16", 0), ("llama", "float32", 2), ("gpt2-dropout", "float32", 0), ("llama", "bfloat16", 2)],
)
def test_a_calibrated_model_comes_back_as_it_was(family: str, dtype: str, lora_rank: int) -> None:
    loaded = build(f"builtin:tiny-{family}", dtype=dtype, lora_rank=lora_rank)
    before = bits(loaded.model)
    risk = calibrated(loaded)
    assert is_unchanged(loaded.model, before)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert (risk.noise is None) == (dtype == "float32")
    assert ("perturbed" in risk.source) == bool(lora_rank)
    assert len(risk.exposures.values) == 8
    assert risk.exposures.values.count(0.0) >= 2
    assert risk.held_out


def test_the_same_seed_gives_the_same_risk() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    assert calibrated(loaded) == calibrated(loaded)


def test_coarser_codecs_are_riskier() -> None:
    (units,) = calibrated(build("builtin:tiny-llama", dtype="float32")).units
    risk = {(unit.unit, unit.codec): sum(unit.local) + sum(unit.propagated) for unit in units}
    names = {unit for unit, _ in risk}
    assert "mlp.gate_proj" in names
    assert all(0 < spread < 1 for unit in units for spread in unit.spread)
    assert all(risk[name, "int4"] > risk[name, "int8"] > 0 for name in names)


def test_statistics_of_norms_and_attention_are_not_worth_compressing() -> None:
    (units,) = calibrated(build("builtin:tiny-llama", dtype="float32")).units
    assert not {unit.unit for unit in units} & {"input_layernorm.rsqrt", "post_attention_layernorm.rsqrt"}


def test_the_error_of_one_block_is_that_of_the_whole_model_there() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    blocks, classes, batches = setting(loaded)
    parts, pair, block = parts_of(loaded.model, blocks), Pair("self_attn.add", find("int4")), 1
    tests = BlockTests(classes, [pair.codec], 1)
    tests._pairs = [[pair]]  # else its branch would be followed down as one
    with taped(blocks, distinct_casts=False) as tapes:
        recorded = Recorded(loaded.model, parts, tapes, next(b for b in batches if b.exposure > 0))
        tests.run(recorded, 0, Sketch(len(parts.everything)))
        exact = recorded.whole()
        runs = JointRuns(loaded.model, parts, tapes, tests.class_of)
        with runs.compressed({block: [pair]}):
            approximate = recorded.whole()
    bounds = [sum(map(len, parts.inside[:index])) for index in range(len(blocks) + 1)]

    def error(start: int, end: int) -> float:
        return squared_distance(approximate[start:end], exact[start:end])

    slope = tests.slopes[block, pair]
    assert math.isclose(error(bounds[block], bounds[block + 1]), slope.local * tests.squares)
    assert math.isclose(tests.squares, squared(exact), rel_tol=1e-9)
    assert error(bounds[block + 1], bounds[-1]) == 0  # blocks above
    below = error(0, bounds[block]) + squared_distance(approximate[bounds[-1] :], exact[bounds[-1] :])
    assert below > 0
    assert math.isclose(below, slope.propagated * tests.squares, rel_tol=1e-3)  # in fp32


def test_every_pair_is_tested_on_every_micro_batch_and_every_branch_followed_down_once() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    blocks, classes, batches = setting(loaded)
    parts, live = parts_of(loaded.model, blocks), [batch for batch in batches if batch.exposure > 0]
    tests, tested, followed = BlockTests(classes, [find("int8")], len(live)), Counter[Place](), Counter[int]()
    with taped(blocks, distinct_casts=False) as tapes, pytest.MonkeyPatch.context() as patch:
        compressed, below = BlockTests._compressed, Recorded.below

        def counted(self: BlockTests, recorded: Recorded, block: int, tape: Tape, pair: Pair) -> Any:
            tested[block, pair] += 1
            return compressed(self, recorded, block, tape, pair)

        def counted_below(self: Recorded, block: int, inputs: Gradients) -> Gradients:
            followed[block] += 1
            return below(self, block, inputs)

        patch.setattr(BlockTests, "_compressed", counted)
        patch.setattr(Recorded, "below", counted_below)
        for number, batch in enumerate(live):
            recorded = Recorded(loaded.model, parts, tapes, batch)
            tests.run(recorded, number, Sketch(len(parts.everything)))
    (pairs,) = tests.pairs(recorded)
    assert set(tested.values()) == {len(live)}
    assert set(tested) == {(block, pair) for block in range(len(blocks)) for pair in pairs}
    branches = len({pair.branch for pair in pairs})
    assert branches > 1
    # below the first block everything is looked at once more for each micro-batch
    assert followed == {block: branches + (len(live) if block == 0 else 0) for block in range(len(blocks))}
    assert tests.passes(recorded) == branches * len(blocks) / 2


def test_risk_is_relative_to_the_gradient_whatever_the_exposure() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    blocks, classes, batches = setting(loaded)
    # an error that was taken relative to the exposure would be 4096 times as large there
    loud = [CalibrationBatch(lambda model, b=b: 16 * b.loss(model), b.exposure / 4) for b in batches]  # type: ignore[misc]
    mixed = [loud[index] if index % 2 else batch for index, batch in enumerate(batches)]
    data = CalibrationData(mixed, "", zero_is_free=True)
    risk, plain = calibrate(loaded.model, blocks, classes, data, ["int8"], mixes=2), calibrated(loaded, ("int8",))
    for one, other in zip(risk.units[0], plain.units[0], strict=True):
        assert all(0.4 < a / b < 2.5 for a, b in zip(one.local, other.local, strict=True))
    assert all(0.4 < mix.predicted / mix.measured < 2.5 for mix in risk.held_out)


def test_risk_is_relative_to_the_gradient_of_the_whole_step() -> None:
    """Of twice as many micro-batches with one gradient the step's is twice as long; independent errors grow less."""
    loaded = build("builtin:tiny-llama", dtype="float32")
    blocks, classes, batches = setting(loaded)
    one = next(batch for batch in batches if batch.exposure > 0)

    def local(count: int) -> list[float]:
        data = CalibrationData([one] * count, "", zero_is_free=True)
        (units,) = calibrate(loaded.model, blocks, classes, data, ["int8"], mixes=1).units
        return [sum(unit.local) for unit in units]

    assert local(16) == pytest.approx([error / 2 for error in local(8)], rel=1e-6)


def test_the_noise_floor_is_relative_to_the_gradient() -> None:
    loaded = build("builtin:tiny-llama", dtype="bfloat16")
    blocks, classes, batches = setting(loaded)
    loud = [CalibrationBatch(lambda model, b=b: 16 * b.loss(model), b.exposure) for b in batches]  # type: ignore[misc]
    noises = [
        calibrate(loaded.model, blocks, classes, CalibrationData(some, "", True), ["int8"], mixes=1).noise
        for some in (batches, loud)
    ]
    assert noises[0] is not None
    assert 0.001 < noises[0] < 0.1  # a bf16 number is within 2^-9 of what it stands for
    assert noises[0] == pytest.approx(noises[1], rel=1e-3)


def alike(units: Sequence[str]) -> tuple[dict[tuple[int, Pair], Slope], list[CalibratedClass | None]]:
    """The same small slope for each unit in each block of a tiny llama, and the classes of the blocks."""
    blocks, classes, _ = setting(build("builtin:tiny-llama", dtype="float32"))
    codec = find("int8")
    slopes = {(block, Pair(unit, codec)): Slope(1e-9, 0.0) for block in range(len(blocks)) for unit in units}
    return slopes, BlockTests(classes, [codec], 1).class_of


def test_mixes_are_of_units_whose_errors_add_up() -> None:
    units = ["self_attn.v_proj", "self_attn.add", "input_layernorm.mul.2", "mlp.up_proj"]
    slopes, found = alike(units)
    mixes = draw_mixes(slopes, found, 1.0, 0.5, 20, seed=0)
    for block, pairs in (drawn for mix in mixes for drawn in mix.items()):
        owner = found[block]
        assert owner is not None
        assert owner.add_up([pair.unit for pair in pairs])
    drawn = {pair.unit for mix in mixes for pairs in mix.values() for pair in pairs}
    assert drawn == set(units)


def test_a_fit_is_to_units_that_are_not_computed_from_each_other() -> None:
    units = ["self_attn.sdpa.out", "mlp.gate_proj", "mlp.up_proj", "mlp.mul"]
    mixes = draw_mixes(*alike(units), 1.0, 0.5, 20, seed=0, apart=True)
    drawn = {frozenset(pair.unit for pair in pairs) for mix in mixes for pairs in mix.values()}
    assert drawn == {frozenset(units[:1]), frozenset(units[1:3]), frozenset(units[3:])}


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e18, 1e30])
def test_squares_are_told_of_gradients_of_any_size(size: float) -> None:
    assert squared([torch.full((1000,), size), None]) == pytest.approx(1000 * size**2, rel=1e-4, abs=0)


def test_calibration_fits_to_such_units_and_judges_by_any(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[bool, ...]] = []
    measure = JointRuns.measure

    def spy(runs: JointRuns, batches: Any, mixes: Any, done: Any) -> list[Joint]:
        drawn = [(runs.class_of[block], pairs) for mix in mixes for block, pairs in mix.items()]
        measured.append(tuple(owner.apart([p.unit for p in pairs]) for owner, pairs in drawn if owner is not None))
        return measure(runs, batches, mixes, done)

    monkeypatch.setattr(JointRuns, "measure", spy)
    calibrated(build("builtin:tiny-llama", dtype="float32"))
    fitted, judged = measured
    assert fitted
    assert all(fitted)
    assert not all(judged)


def test_every_second_mix_is_of_units_where_they_are_least_risky() -> None:
    pairs = [Pair(f"unit{i}", find(codec)) for i in range(5) for codec in ("int8", "int4")]
    slopes = {(block, pair): Slope(1e-7 * (1 + (block * 5) % 9), 0.0) for block in range(9) for pair in pairs}
    mixes = draw_mixes(slopes, [None] * 9, 1.0, 1.0, 10, seed=0)
    blocks = [set(mix) for mix in mixes]
    assert all(found <= {0, 2, 4} for found in blocks[1::2])
    assert not any(found <= {0, 2, 4} for found in blocks[::2])


def test_blocks_and_model_agree_on_the_exact_gradient() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    blocks, _, batches = setting(loaded)
    parts = parts_of(loaded.model, blocks)
    with taped(blocks, distinct_casts=False) as tapes:
        recorded = Recorded(loaded.model, parts, tapes, batches[-1])
        by_blocks = [g for block in range(len(blocks)) for g in recorded.block(block)[0]] + recorded.outside
        whole = recorded.whole()
    assert squared_distance(by_blocks, whole) <= 1e-10 * squared(whole)


def test_a_batch_of_text_has_the_gradient_of_the_grpo_loss() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    text = small_text(loaded, 2)
    samples = tuple(Sample(s.prompt, s.completion, 1.5 - i) for i, s in enumerate(text.samples[:2]))
    (batch,) = text_data(CalibrationText(samples, ""), CPU).batches
    ids = torch.tensor([[*s.prompt, *s.completion] for s in samples])
    same = MicroBatch(ids, torch.tensor([s.advantage for s in samples]), 4, sum(len(s.completion) for s in samples))
    parameters = list(loaded.model.parameters())
    one = torch.autograd.grad(batch.loss(loaded.model), parameters)
    other = torch.autograd.grad(fused_loss(loaded.model, same), parameters)
    torch.testing.assert_close(one, other)
    assert math.isclose(batch.exposure, same.exposure, rel_tol=1e-6)


def test_rows_of_different_lengths_share_a_batch() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    long, short = Sample((5, 6, 7), tuple(range(10, 20)), 1.0), Sample((8,), (9, 10, 11), -0.5)
    (both,) = text_data(CalibrationText((long, short), ""), CPU).batches
    alone = [text_data(CalibrationText((s, s), ""), CPU).batches[0] for s in (long, short)]
    # alone, a row is there twice and its tokens count as the whole step's
    expected = sum(a.loss(loaded.model) * len(s.completion) for a, s in zip(alone, (long, short), strict=True)) / 13
    torch.testing.assert_close(both.loss(loaded.model), expected)


@pytest.mark.parametrize("rows", [4, 16, 32, 33])
def test_a_quarter_of_the_groups_carry_no_signal(rows: int) -> None:
    advantages = seeded_advantages(rows, seed=1)
    groups = [advantages[start : start + GROUP] for start in range(0, rows, GROUP)]
    flat = [group for group in groups if not any(group)]
    assert len(advantages) == rows
    assert 4 * len(flat) >= len(groups)
    assert rows < 8 or len(flat) < len(groups)
    assert all(abs(sum(group)) < 1e-9 for group in groups)


def test_micro_batches_without_exposure_teach_nothing() -> None:
    def batch(exposure: float) -> CalibrationBatch:
        return CalibrationBatch(lambda _: torch.zeros(()), exposure)

    batches = [batch(float(index % 4)) for index in range(16)]
    kept, aside = split(batches)
    assert (len(kept), len(aside)) == (8, 4)
    assert all(b.exposure > 0 for b in [*kept, *aside])
    with pytest.raises(UsageError, match="1 of 3 micro-batches"):
        split([batch(0.0), batch(0.0), batch(1.0)])


@pytest.mark.parametrize("names", [("cast",), ("int8", "int8")])
def test_codecs_that_make_no_sense_together_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="different codecs"):
        compressing(names)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(CodecError, match="int5"):
        compressing(["int5"])


def test_the_damping_that_the_errors_were_made_with_is_found() -> None:
    pairs = [Pair(f"unit{i}", find("int8")) for i in range(12)]
    slopes = {(i % 3, pair): Slope(1e-6 * (i + 1), 4e-6 / (i + 1)) for i, pair in enumerate(pairs)}
    mixes = draw_mixes(slopes, [None] * 3, 1.0, 0.4, 6, seed=0)
    joints = [Joint(2.0, 1.0, 2.0 * predicted_squares(slopes, mix, 0.37)) for mix in mixes]
    assert math.isclose(fit_damping(slopes, mixes, joints), 0.37)
    assert all(predicted_squares(slopes, mix, 0.4) > 0 for mix in mixes)


def test_the_spread_is_the_standard_error_of_a_sum_over_micro_batches() -> None:
    squares = [1.0, 2.0, 4.0, 1.0]
    alike = _Sums([0.5 * square for square in squares], [0.0] * 4).slope(squares, 1.0)
    assert alike == Slope(0.5, 0.0, 0.0)
    # of equal squares it is that of the mean, whatever part of the error arrives
    errors = [1.0, 2.0, 4.0, 9.0]
    slope = _Sums([error / 2 for error in errors], errors).slope([3.0] * 4, 0.5)
    assert (slope.local, slope.propagated) == (8 / 12, 8 / 12)
    assert slope.spread == pytest.approx(statistics.stdev(errors) / math.sqrt(4) / statistics.mean(errors))
    assert _Sums([1.0], [1.0]).slope([1.0], 1.0).spread == 0.0
    assert _Sums([0.0, 0.0], [0.0, 0.0]).slope([1.0, 2.0], 1.0).spread == 0.0


def test_without_an_error_nothing_is_damped() -> None:
    assert fit_damping({}, [{}], [Joint(1.0, 1.0, 0.0)]) == 1.0


def test_a_sketch_of_small_tensors_is_exact() -> None:
    tensors = [torch.randn(7, 5), None, torch.randn(11)]
    one, other = Sketch(3), Sketch(3)
    one.add(tensors)
    one.add(tensors)
    other.add(tensors[2:], 2)
    assert math.isclose(one.squared(), 4 * squared(tensors), rel_tol=1e-6)
    assert math.isclose(one.squared_distance(other), 4 * squared(tensors[:1]) + squared(tensors[2:]), rel_tol=1e-6)


def test_a_sketch_of_a_large_tensor_tells_its_norm() -> None:
    # the mean of n squares of normal numbers has the relative deviation sqrt(2 / n): five of them
    tensor = torch.randn(1024, 640, generator=torch.Generator().manual_seed(0))
    assert tensor.numel() > WHOLE
    sketch = Sketch(1)
    sketch.add([tensor])
    assert math.isclose(sketch.squared(), squared([tensor]), rel_tol=5 * math.sqrt(2 * STRIDE / tensor.numel()))


def test_a_model_is_fp32_for_a_while() -> None:
    model = build("builtin:tiny-gemma3", dtype="bfloat16").model
    before = bits(model)
    with in_fp32(model) as narrow:
        assert narrow
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert is_unchanged(model, before)
    with in_fp32(nn.Linear(2, 2)) as narrow:
        assert not narrow


def test_adapters_that_are_zero_are_moved_by_one_percent_of_their_weight() -> None:
    model = build("builtin:tiny-llama", dtype="float32", lora_rank=4).model
    before = bits(model)
    with perturbed_adapters(model, seed=0) as count:
        adapted = [m for m in model.modules() if hasattr(m, "lora_A")]
        assert count == len(adapted) > 0
        for module in adapted:
            change = module.get_delta_weight("default").detach().norm() / module.base_layer.weight.detach().norm()
            # |B A| of a normal B deviates from its mean by about 1 / sqrt(2 rank out): out is 32 at least
            assert math.isclose(float(change), SHARE, rel_tol=5 / math.sqrt(2 * 4 * 32))
    assert is_unchanged(model, before)


def test_the_gradient_of_a_is_seen_only_with_b_perturbed() -> None:
    risk = calibrated(build("builtin:tiny-llama", dtype="float32", lora_rank=2), ("int4",))
    # the first block's input needs no gradient: a class of its own
    for units in risk.units:
        assert all(sum(unit.local) > 0 for unit in units if unit.unit.startswith("mlp.gate_proj"))
