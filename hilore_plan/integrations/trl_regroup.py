"""`GRPOTrainer` with the rows of each optimizer step regrouped, through `_prepare_inputs(self, generation_batch)`.

TRL 1.16 generates and scores `steps_per_generation` micro-batches at once, shuffles their rows, and hands them out of
`_buffered_inputs` one by one, all padded to the longest completion of the generation. Here, when the first micro-batch
of a step is asked for, those of that step are put together, divided anew and cut to their own longest completion.
Prompts keep their padding: it is on the left, so that without it positions would be others, which models with absolute
positions feel, and in rotary ones the last digits. Completions are padded on the right, where causal models never look.

The trainer's own windows hold: micro-batches count from one optimizer step to the next (`sync_gradients`), there may be
fewer at the end of an epoch, and a generation may begin or end within a step. On several ranks each regroups its own,
into micro-batches of as many rows as before: the trainer's metrics gather a number of each row, and ranks with more or
fewer rows than others would hang or abort.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

from hilore_plan.errors import RefusedError, UsageError
from hilore_plan.exposure.exposure import Norm
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import Normaliser, normaliser_for
from hilore_plan.exposure.regroup import SAVING, Regrouped, Row, leave_out, may_leave_out, may_regroup, regroup
from hilore_plan.exposure.step_rows import step_rows
from hilore_plan.integrations.trl_exposure import known_of, loss_config
from hilore_plan.integrations.trl_micro_batches import Inputs, completion_lengths, joined, picked
from hilore_plan.integrations.trl_trainers import count_tokens
from hilore_plan.schema.plan import Plan

METHOD = "_prepare_inputs"
_LOSS_METHODS = ("compute_loss", "_compute_loss")
_OWN_LOSS = "trl.trainer.grpo_trainer"
_NEEDED = ("_buffered_inputs", "_step", "current_gradient_accumulation_steps")
_MISSING = object()


@dataclass(frozen=True)
class Settings:
    """What to do: regroup, leave rows without signal out, or both; `saving` and `norm` are `regroup`'s."""

    regroup: bool = True
    leave_out_silent: bool = False
    saving: float = SAVING
    norm: Norm = "l2"


def settings_for(plan: Plan, *, regroup: bool = True, leave_out_silent: bool = False) -> Settings:
    """Settings that fit a plan: what low exposure saves under it is what its buckets of exposure differ by."""
    largest = plan.entries[-1].tokens_up_to
    entries = (entry for entry in plan.entries if (entry.tokens_up_to, entry.gradients) == (largest, "live"))
    seconds = [entry.predicted.step_seconds for entry in entries]
    norm: Norm = plan.risk.norm if plan.risk else "l2"
    return Settings(regroup, leave_out_silent, 1 - min(seconds) / max(seconds), norm)


@dataclass
class Counts:
    """Tokens of the steps so far as the trainer padded them and as they were trained, and the rows left out."""

    tokens_before: int = 0
    tokens: int = 0
    left_out: int = 0

    def __bool__(self) -> bool:
        return self.tokens_before > 0

    def as_dict(self) -> dict[str, int]:
        """The counts as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        less = 1 - self.tokens / self.tokens_before if self.tokens_before else 0.0
        out = f"; {self.left_out:,} rows without signal left out" if self.left_out else ""
        return f"  {self.tokens:,} tokens trained, padding included: {less:.0%} less than {self.tokens_before:,}{out}"


class Regrouping:
    """Regrouping in trainers or trainer classes; `undo` takes it out again."""

    def __init__(self, settings: Settings) -> None:
        self.counts = Counts()
        self._settings = settings
        self._active = True
        self._windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()
        self._methods: list[tuple[Any, Any, Any]] = []

    def add(self, trainer_or_class: Any) -> str:
        """Put it into a trainer, or into every instance of a class; the method that has it now.

        What cannot be regrouped is refused when its training begins.

        Raises:
            RefusedError: it has no method where rows are regrouped.
        """
        if not callable(getattr(trainer_or_class, METHOD, None)):
            name = getattr(trainer_or_class, "__name__", type(trainer_or_class).__name__)
            raise RefusedError(f"{name} has no method {METHOD}, where rows are regrouped", _WITHOUT)
        before = vars(trainer_or_class).get(METHOD, _MISSING)
        wrapped = self._wrapped(getattr(trainer_or_class, METHOD), bound=not isinstance(trainer_or_class, type))
        setattr(trainer_or_class, METHOD, wrapped)
        self._methods.append((trainer_or_class, wrapped, before))
        return METHOD

    def undo(self) -> None:
        """Restores the trainers; a second call does nothing."""
        self._active = False
        while self._methods:
            target, wrapped, before = self._methods.pop()
            if vars(target).get(METHOD) is not wrapped:
                continue  # wrapped again since: it stays inside, doing nothing
            if before is _MISSING:
                delattr(target, METHOD)
            else:
                setattr(target, METHOD, before)

    def _wrapped(self, original: Callable[..., Any], *, bound: bool) -> Callable[..., Any]:
        if bound:
            trainer = original.__self__  # type: ignore[attr-defined]

            @wraps(original)
            def on_instance(*args: Any, **kwargs: Any) -> Any:
                return self._prepared(trainer, lambda: original(*args, **kwargs))

            return on_instance

        @wraps(original)
        def on_class(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._prepared(trainer, lambda: original(trainer, *args, **kwargs))

        return on_class

    def _prepared(self, trainer: Any, call: Callable[[], Any]) -> Any:
        """The next micro-batch of a trainer."""
        if not (self._active and trainer.model.training):
            return call()
        window = self._windows.get(trainer)
        if window is None:
            check(trainer, self._settings)  # before a generation is spent on it
            window = self._windows[trainer] = _Window()
        call()
        if ahead := window.begins(trainer):
            window.made = self._divided(trainer, [trainer._buffered_inputs[place] for place in ahead])
        return window.next(trainer)

    def _divided(self, trainer: Any, batches: Sequence[Inputs]) -> list[Inputs]:
        whole = joined(batches)
        config = loss_config(trainer)
        lengths = completion_lengths(whole, getattr(trainer, "pad_to_multiple_of", None) or 1)
        if config.loss_type == "vespo" and whole.get("importance_sampling_ratio") is not None:
            # VESPO multiplies a row's weights with those of its padding, which a clip may have made other than 1
            lengths = [whole["completion_ids"].shape[1]] * len(lengths)
        known = known_of(trainer, whole, config)
        rows = _rows(known, [whole["prompt_ids"].shape[1] + length for length in lengths], self._settings)
        found = _groups(rows, len(batches), config, known["normaliser"], self._settings)
        made = [picked(whole, group, max(lengths[i] for i in group)) for group in found.micro_batches]
        self.counts.left_out += len(found.left_out)
        self.counts.tokens_before += sum(count_tokens(batch) or 0 for batch in batches)
        self.counts.tokens += sum(count_tokens(batch) or 0 for batch in made)
        return made


def regroup_steps(trainer_or_class: Any, settings: Settings | None = None) -> Regrouping:
    """Regroups the rows of each optimizer step of a `GRPOTrainer`, or of every instance of that class.

    Args:
        trainer_or_class: the trainer, or its class.
        settings: see there; `settings_for` has those that fit a plan.
    """
    regrouping = Regrouping(settings or Settings())
    regrouping.add(trainer_or_class)
    return regrouping


def check(trainer: Any, settings: Settings) -> None:
    """Makes sure that a trainer's loss allows what is asked.

    Raises:
        RefusedError: it does not, or this is no `GRPOTrainer`; the message says why.
    """
    name = type(trainer).__name__
    if missing := [attribute for attribute in _NEEDED if not hasattr(trainer, attribute)]:
        raise RefusedError(f"{name} has no {missing[0]}: only TRL's GRPOTrainer can be regrouped", _WITHOUT)
    for method in _LOSS_METHODS:
        owner = next(kind for kind in type(trainer).__mro__ if method in vars(kind))
        if owner.__module__ != _OWN_LOSS:
            raise RefusedError(f"{owner.__name__} has a loss of its own, whose weights of rows are not known", _WITHOUT)
    config = loss_config(trainer)
    normaliser = normaliser_for(config, tokens=1, ranks=trainer.accelerator.num_processes)
    if settings.regroup and (reason := may_regroup(config, normaliser)):
        raise RefusedError(f"rows may not move to other micro-batches: {reason}", _WITHOUT)
    if settings.leave_out_silent and (reason := _why_not_leave_out(trainer, config, normaliser)):
        raise RefusedError(f"rows without signal may not be left out: {reason}", "train without --leave-out-silent")


_WITHOUT = "train without --regroup"


def _why_not_leave_out(trainer: Any, config: LossConfig, normaliser: Normaliser) -> str | None:
    if getattr(trainer, "multi_objective_aggregation", None) == "normalize_then_sum":
        return "its advantages are centred over the batch, so that groups of equal rewards have some too"
    return may_leave_out(config, normaliser)


def _rows(known: dict[str, Any], tokens: Sequence[int], settings: Settings) -> list[Row]:
    if settings.saving == 0 and not settings.leave_out_silent:
        return [Row(length) for length in tokens]
    try:
        return step_rows(tokens=tokens, norm=settings.norm, **known)
    except UsageError:  # a number that is not finite: the step goes wrong in the trainer's own way, not in this one
        return [Row(length) for length in tokens]


def _groups(
    rows: Sequence[Row], count: int, config: LossConfig, normaliser: Normaliser, settings: Settings
) -> Regrouped:
    if not settings.regroup:
        return leave_out(rows, count, loss=config, normaliser=normaliser)
    return regroup(
        rows, count, loss=config, normaliser=normaliser,
        norm=settings.norm, saving=settings.saving, leave_out_silent=settings.leave_out_silent,
        equal_rows=normaliser.ranks > 1,
    )  # fmt: skip


@dataclass
class _Window:
    """Where a trainer is in its step. Its own buffer stays as it is: a later pass may divide it into other steps."""

    buffer: Any = None
    made: list[Inputs] = field(default_factory=list)
    position: int = 0

    def begins(self, trainer: Any) -> range | None:
        """The places in the buffer that belong to this step from here on; None if they are divided already."""
        buffer = trainer._buffered_inputs
        if self.made and buffer is self.buffer:
            return None
        self.buffer = buffer
        here = trainer._step % len(buffer)
        rest = max(1, trainer.current_gradient_accumulation_steps - self.position)
        return range(here, min(len(buffer), here + rest))

    def next(self, trainer: Any) -> Inputs:
        """The next micro-batch; after the last one of a step the trainer synchronises gradients."""
        inputs = self.made.pop(0)
        self.position += 1
        if trainer.accelerator.sync_gradients:
            self.position, self.made = 0, []
        return inputs
