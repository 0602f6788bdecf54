"""Regrouping: the best division of small steps, the same gradient under every loss, and what is refused."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exposure.reference import ACCUMULATION, SETTINGS, Micro, reference_loss
from models import MODELS, VOCABULARY
from tolerances import NEARLY_BEST, OTHER_ORDER
from torch import Tensor, nn

from hilore_plan.errors import RefusedError, UsageError
from hilore_plan.exposure import Row, leave_out, regroup
from hilore_plan.exposure.losses import LOSS_TYPES, LossConfig
from hilore_plan.exposure.normalisers import Normaliser, normaliser_for
from hilore_plan.exposure.step_rows import rows_of_coefficients, step_rows

DAPO = LossConfig("dapo")
TOKENS = normaliser_for(DAPO, accumulation=4, tokens=100)
GRPO = LossConfig("grpo")
OWN_ROWS = normaliser_for(GRPO, accumulation=4)
Groups = Sequence[Sequence[int]]


def some_rows(seed: int, count: int, silent: float = 0.3) -> list[Row]:
    draw = random.Random(seed)
    quiet = [draw.random() < silent for _ in range(count)]
    return [Row(draw.randint(1, 40), 0.0 if zero else draw.lognormvariate(0, 1), zero) for zero in quiet]


# --- the best division, and no worse than before ---


def divisions(rows: Sequence[int], count: int) -> Iterator[list[list[int]]]:
    """All ways to put rows into `count` micro-batches."""
    if count == 0 or not rows:
        if count == 0 and not rows:
            yield []
        return
    first, rest = rows[0], rows[1:]
    for chosen in range(2 ** len(rest)):
        group = [first, *(row for bit, row in enumerate(rest) if chosen >> bit & 1)]
        left = [row for row in rest if row not in group]
        for others in divisions(left, count - 1):
            yield [group, *others]


def estimate(rows: Sequence[Row], groups: Groups, count: int, saving: float, norm: str) -> float:
    """The objective as the docstring has it."""
    whole = sum(row.exposure**2 for row in rows) if norm == "l2" else sum(row.exposure for row in rows)
    total = 0.0
    for group in groups:
        padded = len(group) * max(rows[i].tokens for i in group)
        if norm == "l2":
            share = sum(rows[i].exposure ** 2 for i in group) / (whole / count or 1)
        else:
            share = (sum(rows[i].exposure for i in group) / (whole / count or 1)) ** 2
        total += padded * (1 + saving * math.log(1 + share / 0.01) / math.log(1 + 1 / 0.01))
    return total


def least(rows: Sequence[Row], count: int, size: int | None, limit: int, saving: float, norm: str) -> float:
    fitting = (
        groups
        for groups in divisions(range(len(rows)), count)
        if (size is None or all(len(group) == size for group in groups))
        and all(len(group) * max(rows[i].tokens for i in group) <= limit for group in groups)
    )
    return min(estimate(rows, groups, count, saving, norm) for groups in fitting)


def given_limit(rows: Sequence[Row], count: int) -> int:
    size = len(rows) // count
    return max(size * max(row.tokens for row in rows[i : i + size]) for i in range(0, len(rows), size))


@pytest.mark.parametrize(("loss", "normaliser"), [(DAPO, TOKENS), (GRPO, OWN_ROWS)], ids=["any-rows", "equal-rows"])
@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("saving", [0.0, 0.1, 0.9])
def test_small_steps_get_the_best_of_all_ways(
    loss: LossConfig, normaliser: Normaliser, norm: Any, saving: float
) -> None:
    for seed, (count, size) in enumerate([(2, 2), (2, 3), (3, 2), (1, 4), (4, 1), (2, 4)]):
        rows = some_rows(seed, count * size)
        found = regroup(rows, count, loss=loss, normaliser=normaliser, norm=norm, saving=saving)
        best = least(rows, count, size if normaliser.counts_rows else None, given_limit(rows, count), saving, norm)
        assert estimate(rows, found.micro_batches, count, saving, norm) == pytest.approx(best)


@pytest.mark.parametrize(("loss", "normaliser"), [(DAPO, TOKENS), (GRPO, OWN_ROWS)], ids=["any-rows", "equal-rows"])
@pytest.mark.parametrize("saving", [0.0, 0.1])
def test_steps_of_more_rows_get_nearly_the_best(loss: LossConfig, normaliser: Normaliser, saving: float) -> None:
    for seed in range(4):
        rows = some_rows(seed, 9)
        found = regroup(rows, 3, loss=loss, normaliser=normaliser, saving=saving)
        best = least(rows, 3, 3 if normaliser.counts_rows else None, given_limit(rows, 3), saving, "l2")
        mine = estimate(rows, found.micro_batches, 3, saving, "l2")
        assert best * (1 - 1e-12) <= mine <= best * (1 + (NEARLY_BEST if saving else 1e-12))


@pytest.mark.parametrize(("loss", "normaliser"), [(DAPO, TOKENS), (GRPO, OWN_ROWS)], ids=["any-rows", "equal-rows"])
@pytest.mark.parametrize("silent_out", [False, True])
@pytest.mark.parametrize("count", [4, 32])
def test_every_row_is_somewhere_and_every_micro_batch_within_the_limit(
    loss: LossConfig, normaliser: Normaliser, silent_out: bool, count: int
) -> None:
    for seed in range(3):
        rows = some_rows(seed, 8 * count)
        found = regroup(rows, count, loss=loss, normaliser=normaliser, leave_out_silent=silent_out)
        assert sorted([*found.left_out, *(i for group in found.micro_batches for i in group)]) == list(range(8 * count))
        assert len(found.micro_batches) == count
        padded = [len(group) * max(rows[i].tokens for i in group) for group in found.micro_batches]
        assert max(padded) <= given_limit(rows, count)
        assert padded == sorted(padded, reverse=True)
        assert sum(padded) == found.padded_tokens <= found.padded_tokens_before
        assert all(list(group) == sorted(group) for group in found.micro_batches)
        assert bool(found.left_out) <= silent_out
        assert all(rows[i].silent for i in found.left_out)
        if normaliser.counts_rows and not silent_out:
            assert {len(group) for group in found.micro_batches} == {8}


def test_rows_of_like_length_and_like_exposure_come_together() -> None:
    by_length = [Row(tokens, 1.0) for tokens in (9, 1, 8, 2, 9, 1, 8, 2)]
    found = regroup(by_length, 4, loss=GRPO, normaliser=OWN_ROWS)
    assert found.micro_batches == ((0, 4), (2, 6), (3, 7), (1, 5))
    assert (found.padded_tokens, found.padded_tokens_before) == (40, 68)
    by_exposure = [Row(5, exposure) for exposure in (3.0, 0.0, 3.0, 0.0)]
    assert regroup(by_exposure, 2, loss=GRPO, normaliser=OWN_ROWS).micro_batches == ((0, 2), (1, 3))


def test_micro_batches_are_of_equally_many_rows_where_that_is_asked() -> None:
    rows = [Row(20), Row(3), Row(3), Row(3)]
    free, equal = (
        regroup(rows, 2, loss=DAPO, normaliser=TOKENS, equal_rows=equal_rows).micro_batches
        for equal_rows in (False, True)
    )
    assert free == ((0,), (1, 2, 3))
    assert [len(group) for group in equal] == [2, 2]


def test_what_is_better_than_anything_found_stays() -> None:
    rows = [Row(1000 + i, 10.0 if i % 3 == 0 else 0.1) for i in range(72)]
    high, low = ([i for i in range(72) if (i % 3 == 0) == much] for much in (True, False))
    given = [order[start : start + 6] for order in (high, low) for start in range(0, len(order), 6)]
    found = regroup(rows, given, loss=GRPO, normaliser=OWN_ROWS)
    assert sorted(found.micro_batches) == sorted(map(tuple, given))


def test_swaps_bring_exposures_together_without_more_padding_than_that_is_worth() -> None:
    draw = random.Random(1)
    lengths = [int(draw.lognormvariate(5.5, 0.6)) + 1 for _ in range(64)]
    rows = [Row(length, 0.0 if draw.random() < 0.3 else draw.lognormvariate(0, 0.7)) for length in lengths]
    by_length, both = (
        regroup(rows, 16, loss=GRPO, normaliser=OWN_ROWS, saving=saving).micro_batches for saving in (0.0, 0.1)
    )
    assert estimate(rows, both, 16, 0.1, "l2") < 0.995 * estimate(rows, by_length, 16, 0.1, "l2")


def test_a_step_cannot_be_made_slower() -> None:
    """The given micro-batches may be better than what is found for more rows than can be tried in all ways."""
    for seed in range(20):
        rows = some_rows(seed, 12)
        draw = random.Random(seed)
        order = draw.sample(range(12), 12)
        given = [order[:2], order[2:7], order[7:]]
        found = regroup(rows, given, loss=DAPO, normaliser=TOKENS, saving=0.9)
        assert estimate(rows, found.micro_batches, 3, 0.9, "l2") <= estimate(rows, given, 3, 0.9, "l2") * (1 + 1e-12)
        again = regroup(rows, found.micro_batches, loss=DAPO, normaliser=TOKENS, saving=0.9)
        assert estimate(rows, again.micro_batches, 3, 0.9, "l2") <= estimate(rows, found.micro_batches, 3, 0.9, "l2")


@pytest.mark.parametrize(("loss", "normaliser"), [(DAPO, TOKENS), (GRPO, OWN_ROWS)], ids=["any-rows", "equal-rows"])
@pytest.mark.parametrize("count", [8, 32])
def test_the_order_of_the_rows_decides_nothing(loss: LossConfig, normaliser: Normaliser, count: int) -> None:
    def by_value(row: Row) -> tuple[int, float]:
        return row.tokens, row.exposure

    def divided(rows: Sequence[Row]) -> list[list[Row]]:
        found = regroup(rows, 4, loss=loss, normaliser=normaliser, token_limit=1000)
        return [sorted((rows[i] for i in group), key=by_value) for group in found.micro_batches]

    rows = some_rows(0, count)
    shuffled = random.Random(1).sample(rows, count)
    assert divided(rows) == divided(shuffled)
    assert regroup(rows, 4, loss=loss, normaliser=normaliser) == regroup(rows, 4, loss=loss, normaliser=normaliser)


def test_the_inverse_brings_results_back_into_order() -> None:
    rows = some_rows(3, 12)
    found = regroup(rows, 4, loss=DAPO, normaliser=TOKENS)
    results = torch.tensor([i for group in found.micro_batches for i in group])
    assert results[list(found.inverse)].tolist() == list(range(12))
    without = regroup(rows, 4, loss=DAPO, normaliser=TOKENS, leave_out_silent=True)
    assert without.left_out
    for row, place in enumerate(without.inverse):
        assert (place is None) == (row in without.left_out)
    there = [i for group in without.micro_batches for i in group]
    assert [there[place] for place in without.inverse if place is not None] == sorted(there)


@pytest.mark.speed
@pytest.mark.parametrize(("loss", "normaliser"), [(DAPO, TOKENS), (GRPO, OWN_ROWS)], ids=["any-rows", "equal-rows"])
def test_a_large_step_takes_no_time(loss: LossConfig, normaliser: Normaliser) -> None:
    draw = random.Random(0)
    rows = [Row(int(draw.lognormvariate(5.5, 0.6)) + 1, draw.lognormvariate(0, 1)) for _ in range(256)]
    start = time.process_time()
    regroup(rows, 32, loss=loss, normaliser=normaliser)
    assert time.process_time() - start < (0.02 if normaliser.counts_rows else 0.4)


# --- the same gradient ---


@dataclass(frozen=True)
class StepMicro(Micro):
    """A micro-batch of a step whose tokens are counted over the whole step."""

    step_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.step_tokens


@dataclass(frozen=True)
class Step:
    """The rows of one step: tokens of prompts of two and completions of any length, and what the loss needs of them."""

    ids: Tensor
    micro: Micro

    @property
    def lengths(self) -> list[int]:
        return [max(1, length) for length in self.micro.mask.sum(1).tolist()]

    def rows(self, config: LossConfig) -> list[Row]:
        known = {name: value for name, value in self.micro.arguments().items() if name not in ("logps", "old_logps")}
        return step_rows(config, [2 + n for n in self.lengths], normaliser=Normaliser("row_mean"), **known)  # type: ignore[arg-type]

    def gradient(self, model: nn.Module, config: LossConfig, groups: Groups, rows: int | None = None) -> list[Tensor]:
        """The step's gradient through the loss; where `rows` are given it divides by them, whatever there are."""
        model.zero_grad()
        for group in groups:
            index, length = torch.tensor(group), max(self.lengths[i] for i in group)
            loss = reference_loss(config, self._part(model, index, length))
            (loss * (1 if rows is None else len(group) / rows)).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def _part(self, model: nn.Module, index: Tensor, length: int) -> StepMicro:
        ids = self.ids[index, : 2 + length]
        logps = model(ids).log_softmax(-1)[:, 1:-1].gather(-1, ids[:, 2:, None])[..., 0]
        cut = {}
        for name, value in self.micro.arguments().items():
            wide = value is not None and value.dim() == 2 and value.shape[1] > 1
            cut[name] = value if value is None else value[index, :length] if wide else value[index]
        # drifted from the present policy: the same numbers whatever the micro-batch
        if cut["old_logps"] is not None:
            assert cut["logps"] is not None
            cut["old_logps"] = logps.detach() + cut["old_logps"] - cut["logps"]
        if cut["ref_logps"] is not None:
            assert cut["logps"] is not None
            cut["ref_logps"] = logps.detach() + cut["ref_logps"] - cut["logps"]
        return StepMicro(**{**cut, "logps": logps}, step_tokens=5 * int(self.micro.mask.sum()))  # type: ignore[arg-type]


def make_step(setting: str, seed: int = 0) -> tuple[nn.Module, Step]:
    micro = SETTINGS[setting].micro(seed, rows=12)
    if micro.weights is not None:  # VESPO multiplies those of padding too: a sampler's correction has 1 there
        counts = micro.mask if micro.weights.shape[1] > 1 else torch.ones(12, 1)
        micro = replace(micro, weights=torch.where(counts > 0, micro.weights, 1.0))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (12, 2 + micro.mask.shape[1]), generator=generator)
    return MODELS["plain"].build(dtype=torch.float64, depth=1), Step(ids, micro)


def off(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The relative error of a gradient."""
    assert len(got) == len(want)
    difference = sum(float((a - b).square().sum()) for a, b in zip(got, want, strict=True))
    return math.sqrt(difference / sum(float(b.square().sum()) for b in want))


GIVEN: Groups = [range(start, start + 3) for start in range(0, 12, 3)]
KINDS = ("on-policy", "off-policy", "delta-below-1", "token-weights", "row-keep", "token-advantages", "kl-k3")


@pytest.mark.parametrize("setting", [*KINDS, "everything"])
@pytest.mark.parametrize("loss", [loss for loss in LOSS_TYPES if loss != "bnpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_that_of_the_rows_as_they_were(setting: str, loss: str, level: str) -> None:
    config = SETTINGS[setting].config(loss, level)
    model, step = make_step(setting)
    normaliser = normaliser_for(config, accumulation=ACCUMULATION, tokens=1)
    found = regroup(step.rows(config), 4, loss=config, normaliser=normaliser)
    assert set(map(frozenset, found.micro_batches)) != set(map(frozenset, GIVEN))
    got = step.gradient(model, config, found.micro_batches)
    assert off(got, step.gradient(model, config, GIVEN)) < OTHER_ORDER


@pytest.mark.parametrize("loss", ["grpo", "sapo", "luspo", "dr_grpo"])
def test_rows_that_are_given_and_not_counted_leave_the_sizes_free(loss: str) -> None:
    config = SETTINGS["off-policy"].config(loss, "token")
    model, step = make_step("off-policy")
    normaliser = normaliser_for(config, accumulation=ACCUMULATION, rows=3)
    found = regroup(step.rows(config), 4, loss=config, normaliser=normaliser)
    assert len({len(group) for group in found.micro_batches}) > 1
    want = step.gradient(model, config, GIVEN)
    assert off(step.gradient(model, config, found.micro_batches, rows=3), want) < OTHER_ORDER
    assert off(step.gradient(model, config, found.micro_batches), want) > 1e-3  # had they been counted after all


def test_under_bnpo_another_division_is_another_gradient() -> None:
    config = SETTINGS["off-policy"].config("bnpo", "token")
    model, step = make_step("off-policy")
    with pytest.raises(RefusedError, match="bnpo divides by the tokens of a micro-batch"):
        regroup(step.rows(config), 4, loss=config, normaliser=normaliser_for(config))
    other = regroup(step.rows(config), 4, loss=GRPO, normaliser=OWN_ROWS).micro_batches
    assert off(step.gradient(model, config, other), step.gradient(model, config, GIVEN)) > 1e-3


SILENT = ["on-policy", "off-policy", "token-weights", "row-keep"]


def with_silence(step: Step, rows: Sequence[int]) -> Step:
    """The step with equal rewards in some rows."""
    advantages = step.micro.advantages.clone()
    advantages[list(rows)] = 0
    return Step(step.ids, replace(step.micro, advantages=advantages))


WAYS = [("as-they-were", loss) for loss in LOSS_TYPES] + [("regrouped", loss) for loss in LOSS_TYPES if loss != "bnpo"]


@pytest.mark.parametrize("setting", SILENT)
@pytest.mark.parametrize(("way", "loss"), WAYS)
def test_the_gradient_is_that_with_the_silent_rows(setting: str, way: str, loss: str) -> None:
    config = SETTINGS[setting].config(loss, "token")
    model, step = make_step(setting)
    step = with_silence(step, [1, 3, 4, 5])
    normaliser = normaliser_for(config, accumulation=ACCUMULATION, tokens=1)
    rows = step.rows(config)
    assert {1, 3, 4, 5} <= {i for i, row in enumerate(rows) if row.silent}
    found = (
        regroup(rows, 4, loss=config, normaliser=normaliser, leave_out_silent=True)
        if way == "regrouped"
        else leave_out(rows, 4, loss=config, normaliser=normaliser)
    )
    assert len(found.left_out) >= 2
    assert len(found.micro_batches) == 4
    got = step.gradient(model, config, found.micro_batches)
    assert off(got, step.gradient(model, config, GIVEN)) < OTHER_ORDER


def test_a_silent_row_of_a_micro_batch_whose_rows_count_stays() -> None:
    rows = [Row(4, 0.0, True), Row(5, 1.0), Row(7, 0.0, True), Row(6, 0.0, True)]
    counted = leave_out(rows, 2, loss=GRPO, normaliser=OWN_ROWS)
    assert (counted.micro_batches, counted.left_out) == (((0, 1), (3,)), (2,))
    singly = leave_out(rows, 2, loss=DAPO, normaliser=TOKENS)
    assert (singly.micro_batches, singly.left_out) == (((1,), (3,)), (0, 2))
    # together they are a silent micro-batch, of which only the shortest is run
    found = regroup(rows, 2, loss=GRPO, normaliser=OWN_ROWS, leave_out_silent=True)
    assert found.left_out in ((2,), (3,))
    assert found.padded_tokens == 16  # two rows of 5 and one of 6, or two of 6 and one of 4


def test_silent_rows_come_together_where_that_saves_more_than_like_lengths() -> None:
    rows = [Row(9, 0.0, True), Row(9, 1.0), Row(1, 0.0, True), Row(1, 1.0)]
    found = regroup(rows, 2, loss=GRPO, normaliser=OWN_ROWS, saving=0.0, leave_out_silent=True)
    assert (found.micro_batches, found.left_out) == (((1, 3), (2,)), (0,))
    assert regroup(rows, 2, loss=GRPO, normaliser=OWN_ROWS, saving=0.0).micro_batches == ((0, 1), (2, 3))


def test_the_micro_batches_of_silent_rows_go_to_the_others() -> None:
    rows = [*(Row(tokens, 1.0) for tokens in (5, 6, 7, 8)), *(Row(9, 0.0, True) for _ in range(4))]
    found = regroup(rows, 4, loss=DAPO, normaliser=TOKENS, leave_out_silent=True)
    assert (found.micro_batches, found.left_out) == (((3,), (2,), (1,), (0,)), (4, 5, 6, 7))


@pytest.mark.parametrize(("loss", "normaliser"), [(DAPO, TOKENS), (GRPO, OWN_ROWS)], ids=["any-rows", "equal-rows"])
def test_a_step_without_any_signal_still_has_gradients_of_zero(loss: LossConfig, normaliser: Normaliser) -> None:
    config = SETTINGS["off-policy"].config(loss.loss_type, "token")
    model, step = make_step("off-policy")
    step = with_silence(step, range(12))
    found = regroup(step.rows(config), 4, loss=config, normaliser=normaliser, leave_out_silent=True)
    assert [len(group) for group in found.micro_batches] == [1, 1, 1, 1]
    gradient = step.gradient(model, config, found.micro_batches)
    assert len(gradient) == len(list(model.parameters()))
    assert all(not part.any() for part in gradient)


# --- what is refused ---


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (LossConfig("dapo", top_entropy_quantile=0.8), "top_entropy_quantile"),
        (LossConfig("dapo", entropy_coef=0.01), "entropy bonus is a mean"),
        (LossConfig("dapo", use_adaptive_entropy=True), "entropy bonus is a mean"),
        (LossConfig("dapo", has_auxiliary_loss=True), "auxiliary loss"),
    ],
)
def test_what_is_made_of_a_whole_micro_batch_keeps_its_rows(loss: LossConfig, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        regroup(some_rows(0, 4), 2, loss=loss, normaliser=TOKENS)


@pytest.mark.parametrize(
    ("loss", "ranks", "why"),
    [
        (LossConfig("dapo", beta=0.04), 1, "beta=0.04"),
        (LossConfig("dapo", entropy_coef=0.01), 1, "entropy bonus"),
        (LossConfig("dapo", has_auxiliary_loss=True), 1, "auxiliary loss"),
        (DAPO, 2, "2 processes"),
    ],
)
def test_rows_that_may_have_a_gradient_are_not_left_out(loss: LossConfig, ranks: int, why: str) -> None:
    normaliser = normaliser_for(loss, tokens=10, ranks=ranks)
    with pytest.raises(RefusedError, match=f"may not be left out: .*{why}"):
        leave_out(some_rows(0, 4), 2, loss=loss, normaliser=normaliser)
    if not (loss.has_entropy_bonus or loss.has_auxiliary_loss):
        regroup(some_rows(0, 4), 2, loss=loss, normaliser=normaliser)
        with pytest.raises(RefusedError, match=f"may not be left out: .*{why}"):
            regroup(some_rows(0, 4), 2, loss=loss, normaliser=normaliser, leave_out_silent=True)


def test_where_tokens_are_dropped_by_their_neighbours_only_silent_micro_batches_shrink() -> None:
    loss = LossConfig("dapo", top_entropy_quantile=0.8)
    rows = [Row(4, 0.0, True), Row(5, 1.0), Row(7, 0.0, True), Row(6, 0.0, True)]
    assert leave_out(rows, 2, loss=loss, normaliser=TOKENS).micro_batches == ((0, 1), (3,))


@pytest.mark.parametrize(
    ("micro_batches", "what"),
    [
        (3, "4 rows are no 3 micro-batches"),
        (0, "4 rows are no 0 micro-batches"),
        ([[0, 1], [2]], "do not divide 4 rows"),
        ([[0, 1], [2, 3, 3]], "do not divide 4 rows"),
        ([[0, 1, 2, 3], []], "do not divide 4 rows"),
        ([[0], [1, 2, 3]], "of 1 and 3 rows, where this loss or its trainer needs equally many"),
    ],
)
def test_micro_batches_that_cannot_be_are_named(micro_batches: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        regroup(some_rows(0, 4), micro_batches, loss=GRPO, normaliser=OWN_ROWS)


@pytest.mark.parametrize("count", [4, 12])
def test_a_limit_that_cannot_be_kept_is_an_error_and_one_that_can_is_kept(count: int) -> None:
    rows = [Row(20), *(Row(3) for _ in range(count - 1))]
    short = -(-(count - 1) // 2) * 3
    limit = max(20, short)
    found = regroup(rows, [[0, 1], [2], list(range(3, count))], loss=DAPO, normaliser=TOKENS, token_limit=limit)
    assert max(len(group) * max(rows[i].tokens for i in group) for group in found.micro_batches) <= limit
    with pytest.raises(UsageError, match=f"{short - 1} tokens are too few for each of 3 micro-batches"):
        regroup(rows, [[0, 1], [2], list(range(3, count))], loss=DAPO, normaliser=TOKENS, token_limit=short - 1)


def test_a_limit_is_kept_that_needs_one_micro_batch_of_nearly_all_rows() -> None:
    rows = [Row(100 if i < 7 else 1) for i in range(64)]
    found = regroup(rows, 8, loss=DAPO, normaliser=TOKENS, token_limit=100)
    assert sorted(len(group) for group in found.micro_batches) == [1] * 7 + [57]


def test_rows_that_make_no_sense_are_refused() -> None:
    for wrong in ({"tokens": 0}, {"tokens": 3, "exposure": math.nan}, {"tokens": 3, "exposure": -1.0}):
        with pytest.raises(UsageError, match="no row is like that"):
            Row(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not silent"):
        Row(3, 1.0, silent=True)


# --- rows from tensors ---


def test_a_row_is_silent_for_what_cannot_change_and_not_for_what_is_predicted() -> None:
    mask = torch.ones(5, 3)
    mask[1] = 0
    given: dict[str, Any] = {
        "advantages": torch.tensor([0.0, 1.0, 1.0, -1.0, 1.0]),
        "mask": mask,
        "weights": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
        "old_logps": torch.zeros(5, 3),
        "normaliser": OWN_ROWS,
    }
    clipped = LossConfig("grpo", delta=0.9)  # at the ratio 1, which is the prediction, A > 0 is clipped
    rows = step_rows(clipped, [9, 8, 7, 6, 5], **given)
    assert [row.tokens for row in rows] == [9, 8, 7, 6, 5]
    assert [row.silent for row in rows] == [True, True, True, False, False]
    assert [row.exposure > 0 for row in rows] == [False, False, False, True, False]
    with_kl = step_rows(LossConfig("grpo", beta=0.1), [9] * 5, ref_logps=torch.zeros(5, 3), **given)
    assert not any(row.silent for row in with_kl)
    # in VESPO a weight is part of the ratio, which is never 0
    assert [row.silent for row in step_rows(LossConfig("vespo"), [9] * 5, **given)] == [True, True, False, False, False]


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_exposures_of_rows_add_up_to_those_of_micro_batches(norm: Any) -> None:
    coefficients = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1.0, 0.0]])
    rows = rows_of_coefficients(GRPO, coefficients, [5, 5, 5], norm=norm)
    assert [row.exposure for row in rows] == ([5.0, 0.0, 1.0] if norm == "l2" else [7.0, 0.0, 1.0])
    assert [row.silent for row in rows] == [False, True, False]
    assert not any(row.silent for row in rows_of_coefficients(LossConfig("grpo", beta=0.1), coefficients, [5, 5, 5]))
    with pytest.raises(UsageError, match="2 lengths for 3 rows"):
        rows_of_coefficients(GRPO, coefficients, [5, 5])
    with pytest.raises(UsageError, match="finite exposure"):
        rows_of_coefficients(GRPO, coefficients * math.inf, [5, 5, 5])


def test_regrouping_loads_no_torch() -> None:
    program = (
        "import sys; from hilore_plan.exposure import Row, regroup; print('torch' in sys.modules);"
        "from types import SimpleNamespace as S; "
        "loss = S(top_entropy_quantile=1, has_entropy_bonus=False, has_auxiliary_loss=False);"
        "print(regroup([Row(3), Row(2)], 2, loss=loss, normaliser=S(ignores_grouping=True, counts_rows=True)).inverse)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["False", "(0, 1)"]


@pytest.mark.soak
def test_the_benchmark_finds_the_same_gradients() -> None:
    """It calibrates a plan first."""
    program = Path(__file__).parents[2] / "benchmarks" / "regroup.py"
    done = subprocess.run([sys.executable, str(program), "--quick"], check=True, capture_output=True, text=True)
    assert done.stdout.count("as they were") == 3
    assert done.stdout.count("both") == 3
