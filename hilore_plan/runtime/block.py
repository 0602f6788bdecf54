"""One block under a plan: the forward that stands in for the block's own."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hilore_plan.errors import CaptureError, RefusedError
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.signature import Call, flatten_call
from hilore_plan.runtime.alarm import Alarm
from hilore_plan.runtime.compiled import refuse_compiled_around
from hilore_plan.runtime.fallback import Fallback
from hilore_plan.runtime.frame import Clock, unpack
from hilore_plan.runtime.hooks import Packer, SlotMismatchError, TrialPacker
from hilore_plan.runtime.identity import Identity
from hilore_plan.runtime.recipe import Recipe
from hilore_plan.runtime.reentrant import refuse_in_reentrant
from hilore_plan.runtime.sharded import refuse_partitioned
from hilore_plan.runtime.variants import Variants

TRANSFORMED = "it runs inside a torch.func transform, where hooks on saved tensors are not called"


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

    def may_compress(self, block: int, unit: str) -> bool:
        """Whether any entry compresses this unit."""

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
        self._identity = Identity(index, block, self.original)
        self._unsettled = False
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
        if not (self._active and self.block.training and torch.is_grad_enabled()):
            self.passed_through += 1  # R9
            return self.original(*args, **kwargs)
        refuse_compiled_around(self.name)
        refuse_in_reentrant(self.name)
        if not self._identity.follow():
            self.stored.clear()
        if getattr(self.block, "gradient_checkpointing", False):
            vars(self.block)["gradient_checkpointing"] = False  # trainers switch it on again before each round
        call = flatten_call(args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return self._fall_back(TRANSFORMED, call, stored=True)
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
        own = self._identity
        if own.unfit:
            raise CaptureError(own.unfit)
        find = self._context.variants.find
        return find(own.kind, self.block, own.modules, own.state, own.attributes, call, self.original)

    def _needs_grad(self, call: Call) -> bool:
        return any(tensor.requires_grad for tensor in (*call.tensors, *self._identity.state.tensors()))

    def _run(self, graph: BlockGraph, call: Call) -> Any:
        forced = self.stored.get(graph)
        recipe = self._context.recipe(self.index, graph, count_tokens(call), forced or frozenset())
        unsettled = graph in self._context.variants.unsettled
        if unsettled and not self._unsettled:
            self._unsettled = True
            self._warn("its attributes change from call to call: what it rebuilds is compared in every forward")
        if forced is None or unsettled:
            return self._try_out(graph, recipe, call, forced or frozenset())
        packer = Packer(recipe, call.tensors, self._identity.state, self._context.clock, self._context.alarm)
        output = self._forward(packer, call)
        packer.seal()
        return output

    def _forward(self, packer: Packer, call: Call) -> Any:
        args, kwargs = call.rebuild(call.tensors)
        with saved_tensors_hooks(packer.pack, unpack):
            return self.original(*args, **kwargs)

    def _try_out(self, graph: BlockGraph, recipe: Recipe, call: Call, stored: frozenset[int]) -> Any:
        """A frame that may not fit the graph: nothing is let go before it has come back bit for bit.

        It is the first of this block with this graph, or any if the block's attributes change from call to call.
        """
        refuse_partitioned(f"block {self.name}", self.block)
        context, state = self._context, self._identity.state
        packer = TrialPacker(recipe, call.tensors, state, context.clock, context.everything(graph), context.alarm)
        output = self._forward(packer, call)
        try:
            packer.seal()
        except SlotMismatchError as error:
            self._identity.distrust(error.message)
            return output
        self.stored[graph] = stored | packer.wrong | self._refuse_not_finite(graph, packer.not_finite)
        if wrong := packer.wrong - stored:
            units = ", ".join(graph.values[value].name for value in sorted(wrong))
            self._warn(f"{units} did not come back bit for bit when recomputed: stored from now on")
        return output

    def _refuse_not_finite(self, graph: BlockGraph, values: frozenset[int]) -> frozenset[int]:
        """Those that an entry would compress."""
        names = {value: graph.values[value].name for value in sorted(values)}
        refused = {value: name for value, name in names.items() if self._context.may_compress(self.index, name)}
        for name in refused.values():
            self.refuse(name, "it holds numbers that are not finite")
        return frozenset(refused)

    def refuse(self, unit: str, reason: str) -> None:
        """A codec does not take a unit."""
        if unit not in self.refused:
            self.refused[unit] = reason
            self._warn(f"{unit} cannot be compressed ({reason}): stored instead")

    def _fall_back(self, reason: str, call: Call, *, stored: bool = False) -> Any:
        fallback = self.fallbacks.get(reason)
        if fallback is not None:
            return fallback.run(call)
        refuse_partitioned(f"block {self.name}", self.block)
        fallback = self.fallbacks[reason] = Fallback(self.block, self.original, stored=stored)
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
