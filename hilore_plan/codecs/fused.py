"""The formulas compiled for the CPU: one pass over memory each, bit for bit what the formulas give.

A formula is compiled once for each dtype and number of threads, for any number of groups from two on: the number of
groups is marked as dynamic before the first call, the length of a group is a constant. What torch's compiler makes is
then called directly, without the checks that come before it: the caller is `grouped`, which gives it nothing but
contiguous memory of the right dtype and shape. *Measured* on 4 groups of int8: 13 us a call, where the compiled
function takes 44 us, without guards 31 us, and the formula as it stands 120 us.

No setting of torch is changed, and compiled code lies where inductor keeps all of its own.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hilore_plan.codecs.format import Format

Kernel = Callable[..., None]

SCRATCH_GROUPS = 4096  # large enough for inductor to see work for all threads


class CodecFallbackWarning(UserWarning):
    """Codecs run as they stand: right, but many times slower than compiled."""


class Fused:
    """The compiled formulas, made when first needed; the formulas themselves once compiling has failed."""

    def __init__(self, backend: Callable[..., Callable[..., Any]] | None = None) -> None:
        self._backend = backend
        self._kernels: dict[tuple[Kernel, torch.dtype, int], Kernel] = {}
        self._lock = threading.RLock()
        self._broken = False

    def find(self, form: Format, formula: Kernel, dtype: torch.dtype) -> Kernel:
        """The compiled form of one of the format's two formulas, for groups of `dtype`."""
        key = formula, dtype, torch.get_num_threads()  # inductor writes the number of threads into the code
        kernel = self._kernels.get(key)
        return self._add(key, form) if kernel is None else kernel

    def _add(self, key: tuple[Kernel, torch.dtype, int], form: Format) -> Kernel:
        formula, dtype, _ = key
        with self._lock:
            if key not in self._kernels:
                self._kernels[key] = formula if self._broken else self._compiled(form, formula, dtype)
            return self._kernels[key]

    def _compiled(self, form: Format, formula: Kernel, dtype: torch.dtype) -> Kernel:
        try:
            with _quiet():
                return compiled(formula, scratch(form, formula, dtype), self._backend)
        except Exception as error:  # noqa: BLE001 - no compiler, a broken one, one without an option: all the same here
            self._broken = True
            cause = getattr(error, "inner_exception", error)
            reason = (str(cause).splitlines() or [""])[0]
            warnings.warn(
                f"hilore: codecs run uncompiled, many times slower: {type(cause).__name__}: {reason}\n"
                "hint: install a C++ compiler (g++), or see the documentation of torch.compile",
                CodecFallbackWarning,
                stacklevel=2,
            )
            return formula


def scratch(form: Format, formula: Kernel, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What to compile one of the format's formulas with.

    Runs come from memory of their own and begin it: torch's compiler must not learn that they are parts of one tensor.
    """
    parts = form.allocate(SCRATCH_GROUPS * form.group, torch.device("cpu"))
    for part in parts:
        part.zero_()
    groups = [torch.zeros((SCRATCH_GROUPS, form.group), dtype=dtype) for _ in range(form.runs)]
    if formula is form.encode:
        return (groups[0], *parts)
    return (*(form.runs_of(each)[0] for each in groups), *parts)


def compiled(formula: Kernel, example: Sequence[Tensor], backend: Callable[..., Any] | None = None) -> Kernel:
    """The formula compiled for tensors like the example's, for any number of groups.

    Args:
        formula: writes into some of its arguments and returns nothing.
        example: its arguments; they are written to.
        backend: what compiles a graph; inductor if None.
    """
    recorder = _Recorder(backend)
    for tensor in example:
        torch._dynamo.mark_dynamic(tensor, 0)
    entry = torch.compile(_renewed(formula), fullgraph=True, backend=recorder)
    recorder.expect(example)
    entry(*example)
    return recorder.direct() or _apart_from_modes(entry)


@contextmanager
def _quiet() -> Iterator[None]:
    """Compile apart from whatever the first frame runs in, which may have modes below which torch will not compile.

    Warnings in there are torch's about itself (2.13: a decorator it imports is deprecated), and the user may have made
    errors of them.
    """
    with (
        warnings.catch_warnings(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")
        yield


def _renewed(formula: Kernel) -> Kernel:
    """The same function with a code object of its own: torch counts compilations, and gives up, per code object."""
    assert isinstance(formula, types.FunctionType)
    return types.FunctionType(formula.__code__.replace(), formula.__globals__, formula.__name__)


def _apart_from_modes(entry: Callable[..., Any]) -> Kernel:
    """What torch compiled, for calls from below a dispatch mode as well: there it would refuse to run."""

    def call(*tensors: Tensor) -> None:
        with _disable_current_modes():
            entry(*tensors)

    return call


class _Recorder:
    """A backend of `torch.compile` that keeps what was compiled, and learns in which order it takes its arguments."""

    def __init__(self, backend: Callable[..., Any] | None) -> None:
        self._backend = backend
        self._example: Sequence[Tensor] = ()
        self._order: list[_Argument | None] = []
        self._function: Callable[..., Any] | None = None

    def expect(self, example: Sequence[Tensor]) -> None:
        """The first call will have these tensors."""
        self._example = example

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = (self._backend or _inductor())(graph, inputs)

        def first_call(*arguments: Any) -> Any:
            self._order = [self._place(argument) for argument in arguments]
            self._function = function
            return function(*arguments)

        return first_call

    def _place(self, argument: Any) -> _Argument | None:
        """What this is: a tensor of the example, the number of groups or another size; None for what is not known."""
        if isinstance(argument, int):
            return _Argument(size=None if argument == SCRATCH_GROUPS else argument)
        places = (place for place, tensor in enumerate(self._example) if tensor is argument)
        return next((_Argument(place=place) for place in places), None)

    def direct(self) -> Kernel | None:
        """The compiled function in the formula's order of arguments; None where the order could not be learnt."""
        function = self._function
        order = [argument for argument in self._order if argument is not None]
        self._example = ()
        if function is None or len(order) != len(self._order):
            return None

        def call(*tensors: Tensor) -> None:
            count = len(tensors[0])
            function(*[argument.of(tensors, count) for argument in order])

        return call


class _Argument(NamedTuple):
    """An argument of a compiled function: a tensor by its place, or a size; neither: the number of groups.

    Only that number differs from call to call: all other sizes and strides follow from the format.
    """

    place: int | None = None
    size: int | None = None

    def of(self, tensors: Sequence[Tensor], count: int) -> Tensor | int:
        """Its value in a call."""
        if self.place is not None:
            return tensors[self.place]
        return count if self.size is None else self.size


def _inductor() -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compile_graph: Callable[..., Any] = compile_fx
    return compile_graph
