"""A plan in TRL's `GRPOTrainer`, through `_compute_loss(self, model, inputs)`.

TRL calls that method once per micro-batch, right before forward, with everything known that a plan entry depends on; no
trainer callback runs at that moment. The plan attaches at the first training micro-batch, when the trainer has put its
wrappers around the model. Backward runs after the method has returned: a frame keeps the entry that its forward had.
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
from hilore_plan.integrations.trl_exposure import Exposures, observed
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.report import Report
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

METHOD = "_compute_loss"
_ATTENDED = ("prompt_ids", "completion_ids")


class Attachment:
    """A plan waiting in a trainer or a trainer class; `undo` takes it out again and restores the models.

    With `check_every`, the first micro-batch of every so many steps is also run back exactly, and the true error of its
    gradient goes into the trainer's metrics as `hilore/true_error`.
    """

    def __init__(self, target: Any, plan: Plan, check_every: int = 0) -> None:
        self._target = target
        self._plan = plan
        self._check_every = check_every
        self._checked_step: int | None = None
        self._exposures = Exposures()
        self._runtimes: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()
        self._finished: list[Report] = []
        self._wrapped = _wrapped(getattr(target, METHOD), self, bound=not isinstance(target, type))
        self._had = METHOD in vars(target)
        self._before = vars(target).get(METHOD)
        setattr(target, METHOD, self._wrapped)

    @property
    def runtimes(self) -> list[Runtime]:
        """The runtimes so far, one per model that a trainer trained."""
        return list(self._runtimes.values())

    @property
    def reports(self) -> list[Report]:
        """What each runtime did, also those that are detached or whose models are gone."""
        return [*self._finished, *(runtime.report() for runtime in self.runtimes)]

    def undo(self) -> None:
        """Restores the trainer and every model; a second call does nothing."""
        if vars(self._target).get(METHOD) is self._wrapped:
            if self._had:
                setattr(self._target, METHOD, self._before)
            else:
                delattr(self._target, METHOD)
        for runtime in self.runtimes:
            _keep_report(self._finished, runtime)
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
            weakref.finalize(bare, _keep_report, self._finished, runtime).atexit = False
        return runtime

    def run(self, trainer: Any, model: nn.Module, inputs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """The trainer's loss of one training micro-batch, under the entry that fits it."""
        runtime = self.runtime_of(trainer, model)
        tokens = count_tokens(inputs)
        if self._plan.risk is None:
            with runtime.microbatch(tokens=tokens):
                return call()
        check = self._is_due(trainer)
        known = self._exposures.known(trainer, inputs)
        with runtime.microbatch(tokens=tokens, check=check, **known) as micro_batch, observed(trainer, micro_batch):
            loss = call()
            if check:
                error = micro_batch.true_error(loss, list(model.parameters()))
                trainer._metrics["train"]["hilore/true_error"].append(error)
        return loss

    def _is_due(self, trainer: Any) -> bool:
        """Whether this is the first micro-batch of a step whose error is to be measured."""
        step = trainer.state.global_step
        due = self._check_every > 0 and step % self._check_every == 0 and step != self._checked_step
        if due:
            self._checked_step = step
        return due


def attach_to(trainer_or_class: Any, plan: Plan | str | Path, check_every: int = 0) -> Attachment:
    """Runs a `GRPOTrainer`, or every instance of that class, under `plan`.

    Args:
        trainer_or_class: the trainer, or its class.
        plan: the plan, or its file.
        check_every: measure the true gradient error of every so many steps, which takes two backward passes more.

    Raises:
        RefusedError: this version of TRL has no `_compute_loss` to attach to.
        FileError: the plan cannot be read.
    """
    if not callable(getattr(trainer_or_class, METHOD, None)):
        name = getattr(trainer_or_class, "__name__", type(trainer_or_class).__name__)
        raise RefusedError(f"{name} has no method {METHOD}, where a plan attaches", "pip install 'trl>=1.15'")
    return Attachment(trainer_or_class, plan if isinstance(plan, Plan) else load_plan(plan), check_every)


def install(plan: Plan | str | Path, check_every: int = 0) -> Attachment:
    """`attach_to` the `GRPOTrainer` class itself."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return attach_to(GRPOTrainer, plan, check_every)


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


def count_tokens(inputs: dict[str, Any]) -> int:
    """Tokens of a micro-batch, padding included."""
    return sum(inputs[name].numel() for name in _ATTENDED)


def _keep_report(reports: list[Report], runtime: Runtime) -> None:
    reports.append(runtime.report())


def _wrapped(original: Callable[..., Any], attachment: Attachment, *, bound: bool) -> Callable[..., Any]:
    def planned(trainer: Any, model: nn.Module, inputs: dict[str, Any], call: Callable[[], Any]) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return call()
        return attachment.run(trainer, model, inputs, call)

    if bound:
        trainer = original.__self__  # type: ignore[attr-defined]

        @wraps(original)
        def on_instance(model: nn.Module, inputs: dict[str, Any]) -> Any:
            return planned(trainer, model, inputs, lambda: original(model, inputs))

        return on_instance

    @wraps(original)
    def on_class(self: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
        return planned(self, model, inputs, lambda: original(self, model, inputs))

    return on_class
