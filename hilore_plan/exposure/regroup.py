"""The rows of an optimizer step in other micro-batches, of like length and like exposure; and rows without signal.

A step's gradient is a sum over its rows, so a row may be in any of the step's micro-batches wherever its weight in that
sum stays the same (`may_regroup`). Like lengths need less padding. A micro-batch's exposure decides its plan entry:
where high exposures are together, the other micro-batches have little, and theirs is the entry that compresses more and
is faster; a micro-batch of rows without signal has the one that may compress everything. What is minimised, and how, is
in `partition`.

What does change: the order of summation, hence the last digits; where a model draws random numbers (dropout), which
row gets which; and what a trainer averages over micro-batches for its log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilore_plan.errors import RefusedError, UsageError
from hilore_plan.exposure.partition import Problem, best_groups

if TYPE_CHECKING:
    from hilore_plan.exposure.exposure import Norm
    from hilore_plan.exposure.losses import LossConfig
    from hilore_plan.exposure.normalisers import Normaliser

# of a micro-batch's time, what compressing all that pays saves in plans of small models on a CPU
SAVING = 0.1


@dataclass(frozen=True)
class Row:
    """One row of a step; `step_rows` makes them from tensors.

    Args:
        tokens: its length as it is padded, prompt and completion together.
        exposure: the norm of its coefficients, in any unit that all rows share.
        silent: whether it is exactly without signal. An exposure that is 0 because it was predicted so is not enough.
    """

    tokens: int
    exposure: float = 0.0
    silent: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or not (math.isfinite(self.exposure) and self.exposure >= 0):
            raise UsageError(f"no row is like that: {self}", "give its tokens, and a finite exposure of at least 0")
        if self.silent and self.exposure != 0:
            raise UsageError(f"a row with an exposure is not silent: {self}", "only where every coefficient is 0")


@dataclass(frozen=True)
class Regrouped:
    """Which rows of the step each micro-batch gets, by their places in it, ascending; and which rows none gets.

    The largest micro-batch comes first: if it fits into memory, all do, and what was allocated for it serves the rest.
    `padded_tokens` are rows times the longest, summed up; `padded_tokens_before` those of the micro-batches given.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    left_out: tuple[int, ...]
    padded_tokens: int
    padded_tokens_before: int

    @property
    def inverse(self) -> tuple[int | None, ...]:
        """Of each row of the step, its place in all micro-batches one after the other; None if it is left out."""
        places = {row: place for place, row in enumerate(row for rows in self.micro_batches for row in rows)}
        return tuple(places.get(row) for row in range(len(places) + len(self.left_out)))


def may_regroup(loss: LossConfig, normaliser: Normaliser) -> str | None:
    """Why rows may not move to other micro-batches of their step; None if they may."""
    if not normaliser.ignores_grouping:
        return f"{loss.loss_type} divides by the tokens of a micro-batch, so that rows change each other's weight"
    if loss.top_entropy_quantile < 1:
        return "top_entropy_quantile drops tokens by a quantile over the micro-batch"
    if loss.has_entropy_bonus:
        return "the entropy bonus is a mean over the tokens of the micro-batch"
    if loss.has_auxiliary_loss:
        return "the router's auxiliary loss is made of the loads of the micro-batch"
    return None


def may_leave_out(loss: LossConfig, normaliser: Normaliser) -> str | None:
    """Why rows without signal may not be left out; None if they may."""
    from hilore_plan.exposure.zeros import may_skip

    if normaliser.ranks > 1:
        return f"there are {normaliser.ranks} processes, and what they do must match"
    skipping = may_skip(loss)
    return None if skipping.allowed else skipping.reason


def regroup(
    rows: Sequence[Row],
    micro_batches: int | Sequence[Sequence[int]],
    *,
    loss: LossConfig,
    normaliser: Normaliser,
    token_limit: int | None = None,
    norm: Norm = "l2",
    saving: float = SAVING,
    leave_out_silent: bool = False,
    equal_rows: bool = False,
) -> Regrouped:
    """Puts the rows of one optimizer step into as many micro-batches as before, so that the step gets faster.

    The step's gradient stays the same up to the order of summation. Where the loss divides by a micro-batch's own rows
    (the normaliser's `rows` is None), or with `equal_rows`, all keep equally many; otherwise each has any number but 0.
    The estimated time is never above that of the micro-batches given: they stay where nothing better is found, and
    otherwise the order of the rows decides nothing but which of equal rows goes where.

    Args:
        rows: all of the step; of several ranks, each regroups its own.
        micro_batches: how many there are, which share the rows equally, in order; or the places of the rows of each.
        loss: what is trained.
        normaliser: what it divides by.
        token_limit: of a micro-batch, padding included; None: that of the largest micro-batch given.
        norm: how exposures of rows add up.
        saving: the share of a micro-batch's time that a plan saves where there is no exposure; 0: only lengths count.
        leave_out_silent: leave rows without signal out, as `leave_out` does.
        equal_rows: for trainers whose ranks gather a number of each row: what they gather must have one size.

    Raises:
        RefusedError: this loss does not allow it; the message says why.
        UsageError: micro-batches that do not divide the rows, or not equally where they must; or a limit that cannot be
            kept.
    """
    if reason := may_regroup(loss, normaliser):
        raise RefusedError(f"rows may not move to other micro-batches: {reason}", "train without regrouping")
    given = _divided(rows, micro_batches)
    silent = frozenset(i for i, row in enumerate(rows) if row.silent) if leave_out_silent else frozenset[int]()
    problem = Problem(
        tokens=[row.tokens for row in rows],
        exposures=[row.exposure**2 if norm == "l2" else row.exposure for row in rows],
        count=len(given),
        size=_common_size(given) if normaliser.counts_rows or equal_rows else None,
        limit=max(_padded(rows, group) for group in given) if token_limit is None else token_limit,
        saving=saving,
        power=1 if norm == "l2" else 2,
        droppable=silent,
    )
    start = leave_out(rows, given, loss=loss, normaliser=normaliser).micro_batches if leave_out_silent else given
    found = best_groups(problem, _to_divide(rows, problem))
    best = start if found is None or problem.total(start) < problem.total(found) else found
    if problem.total(best) == math.inf:
        raise UsageError(
            f"{problem.limit} tokens are too few for each of {len(given)} micro-batches of these {len(rows)} rows",
            f"raise the limit (the longest row has {max(problem.tokens)} tokens), or take more micro-batches",
        )
    if leave_out_silent:
        best = [_without_silent(rows, group, singly=problem.size is None) for group in best]
    return _result(rows, given, sorted(map(sorted, best), key=lambda group: (-_padded(rows, group), group)))


def leave_out(
    rows: Sequence[Row], micro_batches: int | Sequence[Sequence[int]], *, loss: LossConfig, normaliser: Normaliser
) -> Regrouped:
    """Leaves rows without signal out of their micro-batches, which else stay as they are.

    Each of them where the loss weighs the other rows of its micro-batch as before; where a micro-batch's own rows or
    tokens are counted, those of micro-batches that are silent altogether. There are as many micro-batches as before,
    for accumulation counts them: a silent one keeps its shortest row. A step without any signal so still has gradients,
    of zeros, and an optimizer takes it as the step that it was (with `grad=None` Adam's moments would not decay).

    Args:
        rows: all of the step.
        micro_batches: as in `regroup`.
        loss: what is trained.
        normaliser: what it divides by.

    Raises:
        RefusedError: these rows may have a gradient, or other processes wait for theirs; the message says why.
        UsageError: micro-batches that do not divide the rows.
    """
    if reason := may_leave_out(loss, normaliser):
        raise RefusedError(f"rows without signal may not be left out: {reason}", "train with all rows")
    given = _divided(rows, micro_batches)
    singly = may_regroup(loss, normaliser) is None and not normaliser.counts_rows
    return _result(rows, given, [_without_silent(rows, group, singly=singly) for group in given])


def _without_silent(rows: Sequence[Row], group: Sequence[int], *, singly: bool) -> list[int]:
    heard = [i for i in group if not rows[i].silent]
    if not heard:
        return [min(group, key=lambda i: (rows[i].tokens, i))]
    return heard if singly else list(group)


def _to_divide(rows: Sequence[Row], problem: Problem) -> list[int]:
    """All rows; or those that are not left out, and of the others what it takes to have no micro-batch empty."""
    if problem.size is not None:
        return list(range(len(rows)))
    heard = [i for i in range(len(rows)) if i not in problem.droppable]
    fill = sorted(problem.droppable, key=lambda i: (rows[i].tokens, i))
    return [*heard, *fill[: max(0, problem.count - len(heard))]]


def _divided(rows: Sequence[Row], micro_batches: int | Sequence[Sequence[int]]) -> list[list[int]]:
    """The micro-batches as places of rows."""
    if isinstance(micro_batches, int):
        if micro_batches < 1 or not rows or len(rows) % micro_batches:
            raise UsageError(
                f"{len(rows)} rows are no {micro_batches} micro-batches of equally many", "or give the rows of each"
            )
        size = len(rows) // micro_batches
        return [list(range(start, start + size)) for start in range(0, len(rows), size)]
    found = [list(group) for group in micro_batches]
    if not all(found) or sorted(i for group in found for i in group) != list(range(len(rows))) or not rows:
        raise UsageError(
            f"these micro-batches do not divide {len(rows)} rows", "each row is in one of them, and none is empty"
        )
    return found


def _common_size(groups: Sequence[Sequence[int]]) -> int:
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        raise UsageError(
            f"micro-batches of {' and '.join(map(str, sizes))} rows, where this loss or its trainer needs equally many",
            "give micro-batches of equally many rows, or a normaliser with rows= and no equal_rows",
        )
    return sizes[0]


def _padded(rows: Sequence[Row], group: Sequence[int]) -> int:
    return len(group) * max(rows[i].tokens for i in group)


def _result(rows: Sequence[Row], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Regrouped:
    there = {i for group in after for i in group}
    return Regrouped(
        micro_batches=tuple(map(tuple, after)),
        left_out=tuple(i for i in range(len(rows)) if i not in there),
        padded_tokens=sum(_padded(rows, group) for group in after),
        padded_tokens_before=sum(_padded(rows, group) for group in before),
    )
