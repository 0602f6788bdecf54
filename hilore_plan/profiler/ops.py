"""Seconds of every op and bytes of every value of one block, from running its graph on real arguments.

Ops are timed in their sequence, not alone: what a recomputation finds in the caches is then what it will find there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.signature import Call
from hilore_plan.profiler.calls import storage_of
from hilore_plan.profiler.clock import seconds_amid_compute, synchronize
from hilore_plan.profiler.memory import Recorder, storage_bytes


@dataclass(frozen=True)
class OpMeasures:
    """Per op its median seconds, and the bytes that it needs beside its outputs while it runs.

    Per value the bytes of its storage and of its narrow form, and the cast's seconds.
    """

    op_seconds: tuple[float, ...]
    op_working_bytes: tuple[int, ...]
    value_bytes: tuple[int, ...]
    narrow_bytes: tuple[int, ...]
    narrow_seconds: tuple[float, ...]


def measure_ops(graph: BlockGraph, block: nn.Module, call: Call, *, repeats: int = 5) -> OpMeasures:
    """Runs the block's graph `repeats + 3` times on the arguments of `call`; the block's state does not change."""
    device = call.tensors[0].device
    sizer = _Sizer(graph, device)
    times: list[list[float]] = [[] for _ in graph.ops]
    with torch.no_grad(), _generator_kept(device):
        for number in range(repeats + 2):
            # the first run tells the sizes, the second one warms the caches as a timed run finds them
            run = sizer if number == 0 else _Timer(graph, device)
            run.run(*_inputs(graph, block, call))
            if number > 1 and isinstance(run, _Timer):
                for index, seconds in run.seconds.items():
                    times[index].append(seconds)
        working = _op_working_bytes(graph, block, call)
    return OpMeasures(
        op_seconds=tuple(statistics.median(found) if found else 0.0 for found in times),
        op_working_bytes=working,
        value_bytes=tuple(_value_bytes(graph, block, call, sizer)),
        narrow_bytes=tuple(sizer.narrow_bytes.get(index, 0) for index in range(len(graph.values))),
        narrow_seconds=tuple(sizer.narrow_seconds.get(index, 0.0) for index in range(len(graph.values))),
    )


def reran_ops(graph: BlockGraph) -> list[int]:
    """The ops that checkpointing runs again: those before the last saved tensor, where it stops early."""
    order = {node: position for position, node in enumerate(graph.capture.module.graph.nodes)}
    last = max((order[slot.saved] for slot in graph.capture.slots), default=-1)
    return [index for index, op in enumerate(graph.ops) if order[op.node] < last]


def storage_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the whole storage behind a tensor: what a view of it keeps alive."""
    return tensor.untyped_storage().nbytes()


def _op_working_bytes(graph: BlockGraph, block: nn.Module, call: Call) -> tuple[int, ...]:
    """What each op allocates beside its outputs: copies of what it cannot read as it lies, buffers of its kernel."""
    inputs = _inputs(graph, block, call)
    with Recorder(call.tensors[0].device) as recorder:
        run = _Marker(graph, recorder)
        run.run(*inputs)
    peaks = {segment.name: segment.peak_bytes - segment.live_bytes for segment in recorder.trace.segments}
    needed = (peaks.get(f"op:{index}", 0) - run.output_bytes.get(index, 0) for index in range(len(graph.ops)))
    return tuple(max(0, count) for count in needed)


def _value_bytes(graph: BlockGraph, block: nn.Module, call: Call, sizer: _Sizer) -> Iterator[int]:
    originals = graph.capture.placeholder_values(block, call)
    given = [node for node in graph.capture.module.graph.nodes if node.op == "placeholder"]
    bytes_of = {node: storage_bytes_of(tensor) for node, tensor in zip(given, originals, strict=True)}
    for index, value in enumerate(graph.values):
        yield bytes_of.get(value.node, sizer.value_bytes.get(index, 0))


def _inputs(graph: BlockGraph, block: nn.Module, call: Call) -> list[torch.Tensor]:
    """The graph's inputs; all but parameters are copies, because a graph may write into them."""
    values = graph.capture.placeholder_values(block, call)
    return [value if isinstance(value, nn.Parameter) else _copy(value) for value in values]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of equal layout; an expanded tensor, which nothing can write into, is taken as it is."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return layout.copy_(tensor)


@contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


class _OpRunner(fx.Interpreter):
    """One run of a graph in which `run_op` runs each op; views are not ops."""

    def __init__(self, graph: BlockGraph) -> None:
        super().__init__(graph.capture.module)
        self._op_of = {op.node: index for index, op in enumerate(graph.ops)}

    def run_node(self, n: fx.Node) -> object:
        """Runs one node."""
        index = self._op_of.get(n)
        return super().run_node(n) if index is None else self.run_op(index, n)

    def run_op(self, index: int, node: fx.Node) -> object:
        """Runs op number `index`."""
        del index
        return super().run_node(node)


class _Timer(_OpRunner):
    """Takes the seconds of each op."""

    def __init__(self, graph: BlockGraph, device: torch.device) -> None:
        super().__init__(graph)
        self._device = device
        self.seconds: dict[int, float] = {}

    def run_op(self, index: int, node: fx.Node) -> object:
        """See `_OpRunner.run_op`."""
        synchronize(self._device)
        start = time.perf_counter()
        result = super().run_op(index, node)
        synchronize(self._device)
        self.seconds[index] = time.perf_counter() - start
        return result


class _Marker(_OpRunner):
    """Marks where each op begins and ends, and takes the bytes of its outputs."""

    def __init__(self, graph: BlockGraph, recorder: Recorder) -> None:
        super().__init__(graph)
        self._recorder = recorder
        self.output_bytes: dict[int, int] = {}

    def run_op(self, index: int, node: fx.Node) -> object:
        """See `_OpRunner.run_op`."""
        given = {storage_of(tensor) for tensor in map(self.env.get, node.all_input_nodes) if torch.is_tensor(tensor)}
        self._recorder.mark(f"op:{index}")
        result = super().run_op(index, node)
        self._recorder.mark("between")
        made = [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor) and storage_of(tensor) not in given]
        self.output_bytes[index] = storage_bytes(made)
        return result


class _Sizer(fx.Interpreter):
    """One run of a graph that takes the bytes of each value and what narrowing it costs."""

    def __init__(self, graph: BlockGraph, device: torch.device) -> None:
        super().__init__(graph.capture.module)
        self._device = device
        self._values = {value.node: (index, value.narrow) for index, value in enumerate(graph.values)}
        self.value_bytes: dict[int, int] = {}
        self.narrow_bytes: dict[int, int] = {}
        self.narrow_seconds: dict[int, float] = {}

    def run_node(self, n: fx.Node) -> object:
        """Runs one node."""
        result = super().run_node(n)
        if n in self._values and isinstance(result, torch.Tensor):
            index, narrow = self._values[n]
            self.value_bytes[index] = storage_bytes_of(result)
            if narrow is not None:
                self.narrow_bytes[index] = storage_bytes_of(result.to(narrow))
                self.narrow_seconds[index] = _cast_seconds(result, narrow, self._device)
        return result


def _cast_seconds(tensor: torch.Tensor, narrow: torch.dtype, device: torch.device) -> float:
    """Seconds to narrow a tensor and to widen it again."""
    narrowed = tensor.to(narrow)
    widening = seconds_amid_compute(lambda: narrowed.to(tensor.dtype), device)
    return seconds_amid_compute(lambda: tensor.to(narrow), device) + widening
