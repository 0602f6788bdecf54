"""What a block is made of besides numbers: its submodules, forwards put in place of theirs, hooks on them.

A graph has all of this in it. Whoever changes it after a plan was attached (a hook on a submodule, an adapter put in, a
layer compiled) has another block from then on, with another graph. A trial would not always tell: a hook that clamps
does nothing until a number is large enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from hilore_plan.graph.signature import PLAIN
from hilore_plan.runtime.attributes import content_of

_INSIDE = ("_modules", "_parameters", "_buffers")
_REPLACED = ("forward", "_compiled_call_impl")
# those on the block itself run around its forward, not in it
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Structure:
    """A block's structure as it was found; `changed` compares with what has become of it."""

    def __init__(self, block: nn.Module) -> None:
        self.modules = tuple(block.modules())
        held = [vars(module) for module in self.modules]
        watched = [each[name] for each in held for name in _INSIDE]
        self._hooks = [each[name] for each in held[1:] for name in _HOOKS]
        # most are empty; they stay so for as long as none of them counts as true
        self._empty = [names for names in (*watched, *self._hooks) if not names]
        self._names = [(names, [*names]) for names in (*watched, *self._hooks) if names]
        self._children = [(each["_modules"], [*each["_modules"].values()]) for each in held if each["_modules"]]
        self._classes = [(module, module.__class__) for module in self.modules[1:]]
        self._replaced = [(each, name, each.get(name)) for each in held[1:] for name in _REPLACED]

    def changed(self) -> bool:
        """Whether a part, a hook or a forward has come, gone, or made way for another. Asked in every forward."""
        return (
            any(self._empty)
            or any([*now] != before for now, before in self._names)  # each hook has a number of its own
            or any([*now.values()] != before for now, before in self._children)
            or any(module.__class__ is not before for module, before in self._classes)
            or any(held.get(name) is not before for held, name, before in self._replaced)
        )

    def key(self, forward: Any) -> Hashable:
        """Equal for blocks with the same code in `forward`, in the same hooks and in the same replaced forwards."""
        places = {id(module): place for place, module in enumerate(self.modules)}
        hooks = tuple(tuple(_code(hook, places) for hook in held.values()) for held in self._hooks)
        return _code(forward, places), hooks, tuple(_code(replaced, places) for *_, replaced in self._replaced)


def _code(thing: Any, places: Mapping[int, int], depth: int = 4) -> Hashable:
    """Something that may run, by what it would do: functions are the same if their code and all that it reads are.

    Args:
        thing: a function, or what it reads.
        places: of the block's own modules, which are the same as those in the same place of another block.
        depth: what lies deeper counts by identity, as a function may have itself in its closure.
    """
    if id(thing) in places:
        return places[id(thing)]
    if isinstance(thing, (*PLAIN, CodeType)):
        return type(thing), thing
    read = _read(thing) if depth else None
    return _Same(thing) if read is None else tuple(_code(each, places, depth - 1) for each in read)


def _read(thing: Any) -> tuple[Any, ...] | None:
    """What is known to be all that a thing consists of; None of other things."""
    if isinstance(thing, FunctionType):
        cells = map(content_of, thing.__closure__ or ())
        return (thing.__code__, *cells, thing.__defaults__, *(thing.__kwdefaults__ or {}).values())
    if isinstance(thing, MethodType):
        return thing.__func__, thing.__self__
    if isinstance(thing, partial):
        return thing.func, thing.args, *thing.keywords.items()
    return thing if isinstance(thing, tuple) else None


class _Same:
    """An object by its identity; held, so that nothing else gets its place in memory."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)
