"""One block under a plan: the forward that stands in for the block's own."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hilore_plan.errors import CaptureError, RefusedError
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.signature import Call, flatten_call
from hilore_plan.runtime.alarm import Alarm
from hilore_plan.runtime.fallback import Fallback
from hilore_plan.runtime.frame import Clock, unpack
from hilore_plan.runtime.hooks import Packer, SlotMismatchError, TrialPacker
from hilore_plan.runtime.recipe import Recipe
from hilore_plan.runtime.state import BlockState
from hilore_plan.runtime.variants import Variants, kind_of


class HiloreWarning(UserWarning):
    """Something runs otherwise than planned, but correctly."""


class Context(Protocol):
    """What a block needs of the runtime it belongs to."""

    clock: Clock
    variants: Variants

    def recipe(self, block: int, graph: BlockGraph, tokens: int, forced: frozenset[int]) -> Recipe:
        """The recipe for this block's frame."""

    def everything(self, graph: BlockGraph) -> Recipe:
        """The recipe that recomputes all."""

    @property
    def alarm(self) -> Alarm | None:
        """What tells frames that their micro-batch is riskier than their entry; None where nothing riskier exists."""


class PlannedForward:
    """Callable in place of `block.forward`. A copy of the model does not get it: there, forward is the plain one."""

    def __init__(self, index: int, name: str, block: nn.Module, context: Context) -> None:
        self.index = index
        self.name = name
        self.block = block
        self.original = block.forward
        functools.update_wrapper(self, self.original)
        self.stored: dict[BlockGraph, frozenset[int]] = {}
        self.refused: dict[str, str] = {}
        self.fallbacks: dict[str, Fallback] = {}
        self.frames = 0
        self.passed_through = 0
        self._context = context
        self._modules = tuple(block.modules())
        self._state = BlockState(block)
        self._kind: Hashable = kind_of(block)
        self._shared = True
        self._unfit = ""
        self._active = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> Any:
        raise RefusedError("a model cannot be pickled while a plan is attached", "call runtime.detach() first")

    def retire(self) -> None:
        """Do nothing but call the original from now on."""
        self._active = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward."""
        if not (self._active and self.block.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            self.passed_through += 1  # R9
            return self.original(*args, **kwargs)
        if getattr(self.block, "gradient_checkpointing", False):
            vars(self.block)["gradient_checkpointing"] = False  # trainers switch it on again before each round
        call = flatten_call(args, kwargs)
        if not self._needs_grad(call):
            self.passed_through += 1
            return self.original(*args, **kwargs)
        try:
            graph = self._find(call)
        except CaptureError as error:
            return self._fall_back(error.message, call)
        self.frames += 1
        return self._run(graph, call)

    def _find(self, call: Call) -> BlockGraph:
        if self._unfit:
            raise CaptureError(self._unfit)
        return self._context.variants.find(self._kind, self.block, self._modules, self._state, call, self.original)

    def _needs_grad(self, call: Call) -> bool:
        return any(tensor.requires_grad for tensor in (*call.tensors, *self._state.tensors()))

    def _run(self, graph: BlockGraph, call: Call) -> Any:
        forced = self.stored.get(graph)
        recipe = self._context.recipe(self.index, graph, count_tokens(call), forced or frozenset())
        if forced is None:
            return self._try_out(graph, recipe, call)
        packer = Packer(recipe, call.tensors, self._state, self._context.clock, self._context.alarm)
        output = self._forward(packer, call)
        packer.seal()
        return output

    def _forward(self, packer: Packer, call: Call) -> Any:
        args, kwargs = call.rebuild(call.tensors)
        with saved_tensors_hooks(packer.pack, unpack):
            return self.original(*args, **kwargs)

    def _try_out(self, graph: BlockGraph, recipe: Recipe, call: Call) -> Any:
        """The first frame of this block with this graph: nothing is let go before it has come back bit for bit."""
        everything = self._context.everything(graph)
        packer = TrialPacker(recipe, call.tensors, self._state, self._context.clock, everything, self._context.alarm)
        output = self._forward(packer, call)
        try:
            packer.seal()
        except SlotMismatchError as error:
            self._distrust(error)
            return output
        self.stored[graph] = packer.wrong
        if packer.wrong:
            units = ", ".join(graph.values[value].name for value in sorted(packer.wrong))
            self._warn(f"{units} did not come back bit for bit when recomputed: stored from now on")
        return output

    def refuse(self, unit: str, reason: str) -> None:
        """A codec does not take a unit."""
        if unit not in self.refused:
            self.refused[unit] = reason
            self._warn(f"{unit} cannot be compressed ({reason}): stored instead")

    def _distrust(self, error: SlotMismatchError) -> None:
        """The graph of a block that looked alike does not fit: capture this one by itself; if it was, give up."""
        if self._shared:
            self._shared = False
            self._kind = (self.index, self._kind)
        else:
            self._unfit = error.message

    def _fall_back(self, reason: str, call: Call) -> Any:
        fallback = self.fallbacks.get(reason)
        if fallback is not None:
            return fallback.run(call)
        fallback = self.fallbacks[reason] = Fallback(self.block, self.original)
        output = fallback.run(call)
        self._warn(f"cannot be captured ({reason}): {fallback.description}")
        return output

    def _warn(self, what: str) -> None:
        warnings.warn(f"hilore: block {self.name}: {what}", HiloreWarning, stacklevel=2)


def count_tokens(call: Call) -> int:
    """Tokens of the block's input, padding included: all dimensions but the last of its first floating tensor."""
    for tensor in call.tensors:
        if tensor.is_floating_point() and tensor.dim() > 1:
            return tensor.numel() // max(tensor.shape[-1], 1)
    return 0
