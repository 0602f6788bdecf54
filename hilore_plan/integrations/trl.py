"""A plan in the trainers of TRL and transformers, through the method that computes a micro-batch's loss.

A trainer calls that method once per micro-batch, right before forward, with everything known that a plan entry depends
on; no trainer callback runs at that moment. The plan attaches at the first training micro-batch, when the trainer has
put its wrappers around the model. Backward runs after the method has returned: a frame keeps the entry that its forward
had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.integrations.exposures import Exposures
from hilore_plan.integrations.trl_exposure import observed, read
from hilore_plan.integrations.trl_trainers import count_tokens, loss_method
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.report import Report
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

_MISSING = object()


class Attachment:
    """A plan waiting in trainers or trainer classes; `undo` takes it out again and restores the models.

    Trainers that follow each other on one model share its runtime. With `check_every`, the first micro-batch of every
    so many steps is also run back exactly, and the true error of its gradient goes into the trainer's metrics as
    `hilore/true_error`.
    """

    def __init__(self, plan: Plan, check_every: int = 0) -> None:
        self.active = True
        self._plan = plan
        self._check_every = check_every
        self._checked_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._exposures = Exposures(read, plan)
        self._runtimes: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()
        self._ends: list[weakref.finalize[..., nn.Module]] = []
        self._finished: list[Report] = []
        self._methods: list[_Method] = []

    def add(self, trainer_or_class: Any) -> None:
        """Put the plan into a trainer, or into every instance of a class.

        Raises:
            RefusedError: it has no method where a plan attaches.
        """
        self._methods.append(_Method(trainer_or_class, self))

    @property
    def runtimes(self) -> list[Runtime]:
        """The runtimes so far, one per model that a trainer trained."""
        return list(self._runtimes.values())

    @property
    def reports(self) -> list[Report]:
        """What each runtime did, also those that are detached or whose models are gone."""
        return [*self._finished, *(runtime.report() for runtime in self.runtimes)]

    def undo(self) -> None:
        """Restores the trainers and every model; a second call does nothing."""
        self.active = False
        while self._methods:
            self._methods.pop().restore()
        while self._ends:
            self._ends.pop()()  # once: nothing more comes of it when the model goes
        for runtime in self.runtimes:
            runtime.detach()
        self._runtimes.clear()

    def runtime_of(self, trainer: Any, model: nn.Module) -> Runtime:
        """The runtime of the model that `trainer` trains; attached if this is the first micro-batch.

        Raises:
            RefusedError: the trainer checkpoints with `use_reentrant=True`.
            PlanMismatchError: the plan was made for another model.
        """
        bare: nn.Module = trainer.accelerator.unwrap_model(model)
        runtime = self._runtimes.get(bare)
        if runtime is None:
            refuse_reentrant(trainer.args)
            runtime = self._runtimes[bare] = apply(bare, self._plan)
            # Scripts often train inside a function, so that the model is gone before anyone asks for the report.
            end = weakref.finalize(bare, _keep_report, self._finished, runtime)
            end.atexit = False
            self._ends.append(end)
        return runtime

    def run(self, trainer: Any, model: nn.Module, inputs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """The trainer's loss of one training micro-batch, under the entry that fits it."""
        runtime = self.runtime_of(trainer, model)
        tokens = count_tokens(inputs)
        if self._plan.risk is None:
            with runtime.microbatch(tokens=tokens):
                return call()
        check = self._is_due(trainer)
        context = self._exposures.microbatch(runtime, trainer, inputs, tokens=tokens, check=check)
        with context as micro_batch, observed(trainer, micro_batch):
            loss = call()
            if check:
                scalar = loss[0] if isinstance(loss, tuple) else loss  # with the model's outputs, if asked for
                _log(trainer, "hilore/true_error", micro_batch.true_error(scalar, list(model.parameters())))
        return loss

    def _is_due(self, trainer: Any) -> bool:
        """Whether this is the first micro-batch of a step whose error is to be measured."""
        step = trainer.state.global_step
        due = self._check_every > 0 and step % self._check_every == 0 and step != self._checked_steps.get(trainer)
        if due:
            self._checked_steps[trainer] = step
        return due


def attach_to(trainer_or_class: Any, plan: Plan | str | Path, check_every: int = 0) -> Attachment:
    """Runs a trainer, or every instance of a trainer class, under `plan`.

    Exposures are known of TRL's `GRPOTrainer`. In `SFTTrainer`, `DPOTrainer` and other subclasses of transformers'
    `Trainer` each micro-batch counts as the riskiest, so plans with one bucket of exposure fit them.

    Args:
        trainer_or_class: the trainer, or its class.
        plan: the plan, or its file.
        check_every: measure the true gradient error of every so many steps, which takes two backward passes more.

    Raises:
        RefusedError: it has no method where a plan attaches.
        FileError: the plan cannot be read.
    """
    attachment = Attachment(plan if isinstance(plan, Plan) else load_plan(plan), check_every)
    attachment.add(trainer_or_class)
    return attachment


def refuse_reentrant(arguments: Any) -> None:
    """Stops a run that would lose gradients.

    Reentrant checkpointing of some layers beside planned ones silently drops gradients where the inputs need none.

    Raises:
        RefusedError: `arguments` ask for reentrant gradient checkpointing.
    """
    # transformers 5.24 calls the options of gradient checkpointing activation_checkpointing, and keeps the old names
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        settings = getattr(arguments, f"{name}_kwargs", None) or {}
        if getattr(arguments, name, False) and dict(settings).get("use_reentrant"):
            _refuse(name)


def _refuse(name: str) -> None:
    raise RefusedError(
        f"the trainer asks for {name} with use_reentrant=True, which loses gradients under a plan",
        f"leave out use_reentrant in {name}_kwargs, or set it to False",
    )


def _keep_report(reports: list[Report], runtime: Runtime) -> None:
    reports.append(runtime.report())


def _log(trainer: Any, name: str, value: float) -> None:
    """TRL's trainers collect their metrics until they log; transformers' own logs at once."""
    if hasattr(trainer, "_metrics"):
        trainer._metrics["train"][name].append(value)
    else:
        trainer.log({name: value})


class _Method:
    """The method of a trainer or class that computes the loss, with the plan in it."""

    def __init__(self, target: Any, attachment: Attachment) -> None:
        self._target = target
        self._name = loss_method(target)
        self._before = vars(target).get(self._name, _MISSING)
        self._planned = _wrapped(getattr(target, self._name), attachment, bound=not isinstance(target, type))
        setattr(target, self._name, self._planned)

    def restore(self) -> None:
        """Puts back what was there; where somebody has wrapped it again, it stays inside, doing nothing."""
        if vars(self._target).get(self._name) is not self._planned:
            return
        if self._before is _MISSING:
            delattr(self._target, self._name)
        else:
            setattr(self._target, self._name, self._before)


def _wrapped(original: Callable[..., Any], attachment: Attachment, *, bound: bool) -> Callable[..., Any]:
    def planned(trainer: Any, model: nn.Module, inputs: dict[str, Any], call: Callable[[], Any]) -> Any:
        if not (attachment.active and model.training and torch.is_grad_enabled()):
            return call()
        return attachment.run(trainer, model, inputs, call)

    if bound:
        trainer = original.__self__  # type: ignore[attr-defined]

        @wraps(original)
        def on_instance(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return planned(trainer, model, inputs, lambda: original(model, inputs, *args, **kwargs))

        return on_instance

    @wraps(original)
    def on_class(self: Any, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return planned(self, model, inputs, lambda: original(self, model, inputs, *args, **kwargs))

    return on_class
