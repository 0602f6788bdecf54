"""What each codec makes of a class's units: bytes, and the seconds to encode and to decode."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from hilore_plan.codecs.base import Codec, decode, encode
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.signature import Call
from hilore_plan.graph.stages import hint_bytes
from hilore_plan.profiler.clock import seconds_amid_compute
from hilore_plan.schema.profile import BlockClass

# of the largest unit's bytes; what is smaller (statistics of norms and of attention) saves nothing and errs the most
LEAST_SHARE = 1 / 64


@dataclass(frozen=True)
class CodecMeasures:
    """By codec, along the values of a class: bytes (0 where the codec does not take the value) and seconds."""

    bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)


def taken(graph: BlockGraph, record: BlockClass, codec: Codec) -> list[int]:
    """The units that `codec` takes and that are large enough to be worth it."""
    sizes = [hint_bytes(value.fake) for value in graph.values]
    units = [i for i, value in enumerate(record.values) if value.keepable and value.kind == "op"]
    least = max((sizes[unit] for unit in units), default=0) * LEAST_SHARE
    return [unit for unit in units if sizes[unit] >= least and _fits(codec, graph.values[unit].fake.dtype)]


def measure_codecs(
    graph: BlockGraph, record: BlockClass, block: nn.Module, call: Call, codecs: Sequence[Codec]
) -> CodecMeasures:
    """Runs the block's graph once on copies of the call's arguments, and every codec on each unit that it takes."""
    run = _CodecRun(graph, record, codecs)
    values = graph.capture.placeholder_values(block, call)
    inputs = [value if isinstance(value, nn.Parameter) else value.detach().clone() for value in values]
    device = call.tensors[0].device
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        run.run(*inputs)
    count = range(len(graph.values))
    return CodecMeasures(
        bytes={c.name: tuple(run.bytes.get((c.name, i), 0) for i in count) for c in codecs},
        seconds={c.name: tuple(run.seconds.get((c.name, i), 0.0) for i in count) for c in codecs},
    )


def _fits(codec: Codec, dtype: torch.dtype) -> bool:
    return codec.refuses(torch.empty(0, dtype=dtype)) is None


class _CodecRun(fx.Interpreter):
    """One run of a graph that measures the codecs on each unit as it is made; equal layouts are timed once."""

    def __init__(self, graph: BlockGraph, record: BlockClass, codecs: Sequence[Codec]) -> None:
        super().__init__(graph.capture.module)
        self._codecs: dict[int, list[Codec]] = {}
        for codec in codecs:
            for unit in taken(graph, record, codec):
                self._codecs.setdefault(unit, []).append(codec)
        self._units = {graph.values[unit].node: unit for unit in self._codecs}
        self._timed: dict[Hashable, float] = {}
        self.bytes: dict[tuple[str, int], int] = {}
        self.seconds: dict[tuple[str, int], float] = {}

    def run_node(self, n: fx.Node) -> object:
        """Runs one node."""
        result = super().run_node(n)
        unit = self._units.get(n)
        if unit is not None and isinstance(result, torch.Tensor):
            for codec in self._codecs[unit]:
                self.bytes[codec.name, unit] = codec.bytes_for(result.numel(), result.dtype)
                self.seconds[codec.name, unit] = self._seconds(codec, result)
        return result

    def _seconds(self, codec: Codec, tensor: torch.Tensor) -> float:
        key = (codec.name, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._timed:
            encoded = encode(codec, tensor)
            decoding = seconds_amid_compute(lambda: decode(encoded), tensor.device)
            self._timed[key] = seconds_amid_compute(lambda: encode(codec, tensor), tensor.device) + decoding
        return self._timed[key]
