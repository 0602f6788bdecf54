"""From the sizes of a call's tensors to every other size that its graph speaks of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.printers import PythonPrinter

Shapes = Sequence[torch.Size]
Number = int | float | bool
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


class Sizes:
    """Evaluates symbolic sizes of one graph for the concrete shapes of a call's tensors."""

    def __init__(self, shape_env: ShapeEnv, inputs: Sequence[torch.Tensor]) -> None:
        self._shape_env = shape_env
        self._places: dict[sympy.Symbol, tuple[int, int]] = {}
        for index, tensor in enumerate(inputs):
            for dim, size in enumerate(tensor.shape):
                expression = expression_of(size)
                if isinstance(expression, sympy.Symbol):
                    self._places.setdefault(expression, (index, dim))

    def function(self, values: Sequence[Any]) -> Callable[[Shapes], tuple[Number, ...]]:
        """A function from shapes to what `values` (numbers and symbolic numbers) come to."""
        expressions = [self._shape_env.simplify(expression_of(value)) for value in values]
        symbols = sorted({s for e in expressions for s in getattr(e, "free_symbols", ())}, key=str)
        places = [self._places[symbol] for symbol in symbols]
        printer = PythonPrinter()
        body = ", ".join(printer.doprint(expression) for expression in expressions)
        names = ", ".join(printer.doprint(symbol) for symbol in symbols)
        source = f"lambda {names}: ({body},)" if expressions else "lambda: ()"
        compute = eval(source, {"math": math, **SYMPY_INTERP})  # noqa: S307 - sizes as Python, printed by torch

        def evaluate(shapes: Shapes) -> tuple[Number, ...]:
            result: tuple[Number, ...] = compute(*(shapes[index][dim] for index, dim in places))
            return result

        return evaluate

    def geometry(self, tensors: Sequence[torch.Tensor]) -> Callable[[Shapes], tuple[Geometry, ...]]:
        """A function from shapes to the concrete (size, stride, storage offset) of symbolic tensors."""
        flat: list[Any] = [n for tensor in tensors for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
        ranks = [tensor.dim() for tensor in tensors]
        evaluate = self.function(flat)

        def compute(shapes: Shapes) -> tuple[Geometry, ...]:
            numbers: Any = evaluate(shapes)
            result, start = [], 0
            for rank in ranks:
                middle, end = start + rank, start + 2 * rank
                result.append((numbers[start:middle], numbers[middle:end], numbers[end]))
                start = end + 1
            return tuple(result)

        return compute


def expression_of(value: Any) -> Any:
    """The sympy expression of a symbolic number, or of a plain one."""
    node = getattr(value, "node", None)
    return sympy.sympify(value) if node is None else node.expr


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node's value is a symbolic number."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_unbacked(node: fx.Node) -> bool:
    """Whether the node's value, or its size, depends on the data in a tensor."""
    value = node.meta.get("val")
    return value is not None and bool(free_unbacked_symbols(value))
