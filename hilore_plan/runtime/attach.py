"""`apply` a plan to a model: the runtime that holds the planned blocks together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.graph.blocks import NamedBlocks, find_blocks
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.runtime.actions import NOTHING, PlanActions, check_units
from hilore_plan.runtime.alarm import Alarm
from hilore_plan.runtime.block import PlannedForward
from hilore_plan.runtime.compiled import refuse_compiled
from hilore_plan.runtime.exposures import exposure_of
from hilore_plan.runtime.fits import check_model, check_parameters
from hilore_plan.runtime.frame import Clock
from hilore_plan.runtime.gradients import Gradients
from hilore_plan.runtime.lookup import Lookup
from hilore_plan.runtime.meter import Meter
from hilore_plan.runtime.microbatch import Microbatch
from hilore_plan.runtime.recipe import Recipe
from hilore_plan.runtime.report import EntryUse, Report
from hilore_plan.runtime.sharded import is_sharded, refuse_sharded
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.io import load_plan
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.record import GradientState, Norm

_MISSING = object()


def apply(model: nn.Module, plan: Plan | str | Path, *, blocks: Sequence[str | nn.Module] | None = None) -> Runtime:
    """Attach a plan to a model: from now on its blocks keep and rebuild what the plan says.

    Args:
        model: the model that trains, wrapped (PEFT, DDP, FSDP2) or not.
        plan: a plan, or the path of a plan file.
        blocks: the planned blocks, as modules or names, where they are not the model's one list of equal blocks.

    Returns:
        The runtime; `runtime.detach()` restores the model. It is also a context manager that detaches at its end.

    Raises:
        PlanMismatchError: the plan was made for another model.
        RefusedError: a block, or what it is a part of, is compiled; a block is checkpointed with `use_reentrant=True`,
            or has a plan already; the model is sharded by FSDP1 or DeepSpeed ZeRO-3.
        FileError: the plan file is missing or not a plan.
    """
    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    refuse_sharded(model)
    found = find_blocks(model, blocks)
    refuse_compiled(model, found)  # before it is compared: compiled modules have other names for their parameters
    check_model(found, loaded)
    for name, block in found:
        _refuse_unsafe(name, block)
    return Runtime(loaded, found, model)


class Runtime:
    """A plan at work in a model."""

    def __init__(self, plan: Plan, blocks: NamedBlocks, model: nn.Module) -> None:
        self.plan = plan
        self.clock = Clock()
        self.variants = Variants()
        self.meter = Meter()
        self.norm: Norm = plan.risk.norm if plan.risk else "l2"
        self.escalations = 0
        self.held_back = 0
        self.lookup = Lookup(plan)
        self.gradients: GradientState = "live"
        self._gradients = Gradients(model) if plan.distinguishes_gradients else None
        self._latest = len(blocks)
        self._actions = PlanActions(plan)
        self._recipes: dict[tuple[BlockGraph, int, frozenset[int], bool], Recipe] = {}
        self._checked: set[int] = set()
        # all others were compared by `apply`, and may be frozen or converted since
        self._sharded = {i for i, (_, block) in enumerate(blocks) if is_sharded(block)}
        self._uses: Counter[int | None] = Counter()
        self._errors = [entry.predicted.error for entry in plan.entries]
        self.current = Microbatch(self, None, None)
        self._blocks = [PlannedForward(i, name, block, self) for i, (name, block) in enumerate(blocks)]
        self._before: list[dict[str, Any]] = []
        try:
            for planned in self._blocks:
                self._before.append(_attach(planned))
        except BaseException:
            self.detach()  # R9
            raise

    def microbatch(
        self,
        tokens: int | None = None,
        exposure: float | None = None,
        *,
        coefficients: torch.Tensor | None = None,
        check: bool = False,
        **known: Any,
    ) -> Microbatch:
        """Select the plan entry for the forwards inside this context.

        Say as much as is known: the exposure itself, the loss's coefficients, or what they are computed from. Nothing
        at all is safe, and slower: then the micro-batch counts as the riskiest.

        Args:
            tokens: tokens of the micro-batch, padding included; None: counted in each block's input.
            exposure: how much the micro-batch can move the policy, in multiples of the mean; None: as much as any.
            coefficients: dLoss/dlogp of the response tokens, of any shape.
            check: whether `true_error` of the context will be asked for.
            known: `advantages`, `mask` (both needed), `loss` (a `LossConfig` or the name of a loss type), `old_logps`,
                and what else `exposure.predict.predict` takes.

        Raises:
            UsageError: values that are not finite, or arguments that do not fit together.
        """
        if coefficients is None and not known:
            return Microbatch(self, tokens, exposure, None, check)
        absolute = exposure_of(coefficients, known, exposure, self.norm)
        return Microbatch(self, tokens, self.meter.relative(absolute), absolute, check)

    def error_of(self, entry: int | None) -> float:
        """See `microbatch.Owner`."""
        return 0.0 if entry is None else self._errors[entry]

    @property
    def over_budget(self) -> bool:
        """See `microbatch.Owner`."""
        return self.plan.risk is not None and self.meter.errs_more_than(self.plan.risk.limit)

    @property
    def alarm(self) -> Alarm | None:
        """See `block.Context.alarm`."""
        return self.current.alarm

    def detach(self) -> None:
        """Restore the model exactly as it was; a second call does nothing. Frames in flight can still run backward."""
        for planned, before in zip(self._blocks, self._before, strict=False):
            _restore(planned, before)
        self._before = []

    def report(self) -> Report:
        """What happened so far."""
        entries = [EntryUse.of(entry, self._uses[i]) for i, entry in enumerate(self.plan.entries)]
        return Report(
            entries=entries,
            frames=sum(block.frames for block in self._blocks),
            beyond_the_plan=self._uses[None],
            passed_through=sum(block.passed_through for block in self._blocks),
            recompute_seconds=self.clock.seconds,
            programs_run=self.clock.runs,
            peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            captures=self.variants.captures,
            fallbacks={
                block.name: f"{fallback.description} ({reason})"
                for block in self._blocks
                for reason, fallback in block.fallbacks.items()
            },
            stored_instead={block.name: units for block in self._blocks if (units := _stored_units(block))},
            escalations=self.escalations,
            held_back=self.held_back,
            expected_error=self._expected_error(),
            error_budget=None if self.plan.risk is None else self.plan.risk.limit,
        )

    def _expected_error(self) -> float:
        """As metered; where no micro-batch was ever announced, as if all of them had had the same exposure."""
        if self.meter.counted or not self._uses:
            return self.meter.expected_error
        square = sum(count * self.error_of(entry) ** 2 for entry, count in self._uses.items())
        return math.sqrt(square / self._uses.total())

    def recipe(self, block: int, graph: BlockGraph, tokens: int, forced: frozenset[int]) -> Recipe:
        """See `block.Context.recipe`."""
        if self._gradients is not None and block <= self._latest:  # another forward begins
            self.gradients = self._gradients.state()
        self._latest = block
        current = self.current
        entry = current.find(tokens)
        self._uses[entry] += 1
        actions = self._actions.of(entry, block)
        careful = current.checked or self.lookup.has_riskier(entry)
        if careful and current.alarm is None:
            current.alarm = Alarm()
        key = (graph, id(actions), forced, careful)
        recipe = self._recipes.get(key)
        if recipe is None:
            self._check(block, graph, entry)
            recipe = self._recipes[key] = Recipe(graph, actions, forced, careful=careful)
            self._note_refused(block, recipe)
        return recipe

    def _note_refused(self, block: int, recipe: Recipe) -> None:
        planned = self._blocks[block]
        for value, reason in recipe.refused.items():
            planned.refuse(recipe.graph.values[value].name, reason)

    def everything(self, graph: BlockGraph) -> Recipe:
        """See `block.Context.everything`."""
        key = (graph, id(NOTHING), frozenset[int](), False)
        if key not in self._recipes:
            self._recipes[key] = Recipe(graph, NOTHING)
        return self._recipes[key]

    def may_compress(self, block: int, unit: str) -> bool:
        """See `block.Context.may_compress`."""
        return self._actions.may_compress(block, unit)

    def _check(self, block: int, graph: BlockGraph, entry: int | None) -> None:
        """One graph of each block must have the plan's units; a variant may lack some (a mask, frozen inputs)."""
        if entry is not None and block not in self._checked:
            if block in self._sharded:
                check_parameters(block, self._blocks[block].name, self._blocks[block].block, self.plan)
            if check_units(self._blocks[block].name, graph, self._actions.of(entry, block)):
                self._checked.add(block)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def _refuse_unsafe(name: str, block: nn.Module) -> None:
    if isinstance(vars(block).get("forward"), PlannedForward):
        raise RefusedError(f"block {name} has a plan already", "call runtime.detach() first")
    keywords: dict[str, Any] = getattr(getattr(block, "_gradient_checkpointing_func", None), "keywords", {})
    if getattr(block, "gradient_checkpointing", False) and keywords.get("use_reentrant"):
        raise RefusedError(
            f"block {name} is checkpointed with use_reentrant=True, which loses gradients in a mix with planned blocks",
            'pass gradient_checkpointing_kwargs={"use_reentrant": False}, or switch gradient checkpointing off',
        )


def _attach(planned: PlannedForward) -> dict[str, Any]:
    """Put the planned forward in place; returns what stood there before."""
    attributes = vars(planned.block)
    before = {name: attributes.get(name, _MISSING) for name in ("forward", "gradient_checkpointing")}
    planned.block.forward = planned
    return before


def _restore(planned: PlannedForward, before: dict[str, Any]) -> None:
    planned.retire()
    attributes = vars(planned.block)
    if attributes.get("forward") is not planned:  # wrapped again since: stay inside, doing nothing
        before = {name: value for name, value in before.items() if name != "forward"}
    for name, value in before.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _stored_units(block: PlannedForward) -> list[str]:
    wrong = [graph.values[value].name for graph, wrong in block.stored.items() for value in sorted(wrong)]
    return [*dict.fromkeys([*wrong, *block.refused])]
