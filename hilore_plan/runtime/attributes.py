"""The plain attributes of a block's modules, read live: a graph has in it what they were when it was captured."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from types import CellType, FunctionType
from typing import Any

from torch import nn

from hilore_plan.graph.signature import PLAIN

POSITION_NAMES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")
# what torch and trainers keep there, and what tells nothing about the numbers that a forward computes
LEFT_OUT = frozenset({*vars(nn.Module()), *POSITION_NAMES, "gradient_checkpointing", "forward"})


class Snapshot:
    """Attributes as they were at one time: compared by value, hashed once."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Hashable) -> None:
        self._values = values
        self._hash = hash(values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Snapshot) and self._values == other._values)


class Attributes:
    """The attributes that a block may compute with: numbers, texts, functions, and containers of them.

    Every forward asks for them, and seldom has one changed: then all that is done is to compare them.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = [vars(module) for module in block.modules()]
        self._size = -1
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        # containers of what may not be compared, as tensors are; nearly always there are none
        self._mixed: list[tuple[dict[str, Any], str]] = []
        self._last = Snapshot(())

    def now(self) -> Hashable:
        """All of them, as they are now."""
        size = sum(map(len, self._modules))  # a forward may make new ones
        if size != self._size or self._mixed or [held.get(name) for held, name in self._places] != self._values:
            self._look(size)
        return self._last

    def _look(self, size: int) -> None:
        found = [(held, name) for held in self._modules for name in held if _counts(name, held[name])]
        self._size = size
        self._places = [(held, name) for held, name in found if _is_plain(held[name])]
        self._mixed = [(held, name) for held, name in found if not _is_plain(held[name])]
        # containers are copied: one that is written into would always be equal to itself
        self._values = [copy.deepcopy(held[name]) for held, name in self._places]
        latest = Snapshot(tuple(_frozen(held[name]) for held, name in found))
        if latest != self._last:
            self._last = latest


def plain_attributes(module: nn.Module) -> Hashable:
    """Those of one module by name, in one order for all modules."""
    held = vars(module)
    return tuple((name, _frozen(held[name])) for name in sorted(held) if _counts(name, held[name]))


def _counts(name: str, value: Any) -> bool:
    return name not in LEFT_OUT and isinstance(value, (*PLAIN, tuple, list, dict, set, frozenset, FunctionType))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, FunctionType))


def _frozen(value: Any, functions: int = 4) -> Hashable:
    """A value that is equal to another if a forward could not tell the two apart; of other objects, their type.

    A function may have itself in its closure: of those inside more than `functions` others, the code counts alone.
    """
    if isinstance(value, PLAIN):
        return value.__class__, value
    if isinstance(value, (tuple, list)):
        return value.__class__, tuple(_frozen(item, functions) for item in value)
    if isinstance(value, dict):
        return tuple((_frozen(key, functions), _frozen(item, functions)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_frozen(item, functions) for item in value)
    if isinstance(value, FunctionType):
        cells = (value.__closure__ or ()) if functions else ()
        return value.__code__, tuple(_frozen(content_of(cell), functions - 1) for cell in cells)
    kind: type = value.__class__
    return kind


def content_of(cell: CellType) -> Any:
    """What a variable in a function's closure holds; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
