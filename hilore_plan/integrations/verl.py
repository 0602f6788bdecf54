"""A plan in verl's FSDP engine, through `forward_step(self, micro_batch, loss_function, forward_only)`.

The engine calls that method once per micro-batch, and runs backward after it has returned. Log-prob passes of the actor
and the reference call it with `forward_only`: they run as without a plan. The plan attaches at the first training
micro-batch, when the engine has sharded its module with FSDP2; under verl's `fsdp` strategy, which is FSDP1, it is
refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.integrations.exposures import Exposures
from hilore_plan.integrations.verl_exposure import observed, read
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.microbatch import Microbatch
from hilore_plan.runtime.report import Report
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan

METHOD = "forward_step"


class EngineAttachment:
    """A plan in a class of engines; `undo` takes it out again and restores the models."""

    def __init__(self, engine_class: Any, plan: Plan) -> None:
        self._class = engine_class
        self._plan = plan
        self._exposures = Exposures(read, plan)
        self._runtimes: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()
        self._finished: list[Report] = []
        self._original = vars(engine_class)[METHOD]
        setattr(engine_class, METHOD, _planned(self._original, self))

    @property
    def reports(self) -> list[Report]:
        """What the runtime of each module did, also of those that are gone."""
        return [*self._finished, *(runtime.report() for runtime in self._runtimes.values())]

    def undo(self) -> None:
        """Restore the class and every module that it trained."""
        setattr(self._class, METHOD, self._original)
        for runtime in self._runtimes.values():
            runtime.detach()
        self._runtimes.clear()

    def runtime_of(self, engine: Any) -> Runtime:
        """The runtime of an engine's module; attached if this is the first micro-batch.

        Raises:
            RefusedError: the module is sharded by FSDP1.
            PlanMismatchError: the plan was made for another model.
        """
        module: nn.Module = engine.module
        runtime = self._runtimes.get(module)
        if runtime is None:
            runtime = self._runtimes[module] = _apply(module, self._plan)
            # an engine may be gone before anyone asks for the report
            weakref.finalize(module, _keep_report, self._finished, runtime).atexit = False
        return runtime

    def microbatch(self, engine: Any, micro_batch: Any, loss_function: Any) -> Microbatch:
        """The context of one training micro-batch of an engine."""
        runtime = self.runtime_of(engine)
        if self._plan.risk is None:
            return runtime.microbatch()
        return self._exposures.microbatch(runtime, micro_batch, loss_function)


def _keep_report(reports: list[Report], runtime: Runtime) -> None:
    reports.append(runtime.report())


def attach_to(engine_class: Any, plan: Plan | str | Path) -> EngineAttachment:
    """Runs every engine of a class under `plan`.

    Args:
        engine_class: the class that defines `forward_step`; engines of value models have one of their own, and no plan.
        plan: the plan, or its file.

    Raises:
        RefusedError: the class defines no `forward_step`.
        FileError: the plan cannot be read.
    """
    if METHOD not in vars(engine_class):
        raise RefusedError(
            f"{engine_class.__name__} defines no {METHOD}, where a plan attaches",
            "give verl's FSDPEngineWithLMHead: pip install 'verl>=0.9.1'",
        )
    return EngineAttachment(engine_class, plan if isinstance(plan, Plan) else load_plan(plan))


def _planned(original: Callable[..., Any], attachment: EngineAttachment) -> Callable[..., Any]:
    @wraps(original)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if forward_only or not self.module.training or not _is_actor(self):
            return original(self, micro_batch, loss_function=loss_function, forward_only=forward_only)
        with attachment.microbatch(self, micro_batch, loss_function) as context:
            loss_function = observed(loss_function, context, getattr(self, "scaler", None))
            return original(self, micro_batch, loss_function=loss_function, forward_only=forward_only)

    return forward_step


def _is_actor(engine: Any) -> bool:
    """Whether an engine trains a language model: those of critics inherit its forward step."""
    return str(getattr(engine.model_config, "model_type", "language_model")) == "language_model"


def _apply(module: nn.Module, plan: Plan) -> Runtime:
    try:
        return apply(module, plan)
    except RefusedError as error:
        if "FSDP1" not in error.message:
            raise
        raise RefusedError(error.message, f"{error.hint}; in verl: actor_rollout_ref.actor.strategy=fsdp2") from error
