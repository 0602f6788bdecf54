"""What it costs to keep a value in another form: the way there and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import strategies
import torch
from torch import nn

from hilore_plan.codecs import registry
from hilore_plan.graph.capture import capture
from hilore_plan.graph.recovery_units import block_graph
from hilore_plan.graph.signature import flatten_call
from hilore_plan.profiler import formats, ops

CPU = torch.device("cpu")


class Tanh(nn.Module):
    """One op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def clock(results: list[torch.Tensor]) -> Callable[..., float]:
    """Says that work took 1 second, then 10, then 100, and keeps what came of it."""
    powers: Iterator[int] = count()

    def seconds(work: Callable[[], object], device: torch.device) -> float:
        result = work()
        results.append(result)  # type: ignore[arg-type]
        return float(10 ** next(powers))

    return seconds


def test_a_codec_costs_encoding_and_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[torch.Tensor] = []
    monkeypatch.setattr(formats, "seconds_amid_compute", clock(results))
    block = Tanh()
    graph = block_graph(capture(block, flatten_call((torch.randn(4, 8, requires_grad=True),), {})))
    run = formats._CodecRun(graph, strategies.Graph([]).block_class("Layer", [0], 1), [])
    tensor = torch.randn(4, 64)
    assert run._seconds(registry.find("int8"), tensor) == 1 + 10
    assert run._seconds(registry.find("int8"), tensor) == 1 + 10  # not timed again
    assert len(results) == 2
    decoded = next(result for result in results if isinstance(result, torch.Tensor))
    torch.testing.assert_close(decoded, tensor, atol=float(tensor.abs().max()) / 127, rtol=0.0)


def test_a_cast_costs_narrowing_and_widening(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "seconds_amid_compute", clock(results))
    assert ops._cast_seconds(torch.randn(4, 8), torch.bfloat16, CPU) == 1 + 10
    assert {result.dtype for result in results} == {torch.bfloat16, torch.float32}
