"""Memory accounting against allocations whose sizes are known."""

from __future__ import annotations

import torch

from hilore_plan.profiler.memory import Recorder, storage_bytes

CPU = torch.device("cpu")


def test_peak_is_the_highest_running_sum() -> None:
    with Recorder(CPU) as recorder:
        a = torch.empty(1000)
        b = torch.empty(2000)
        del b
        c = torch.empty(500)
    assert recorder.trace.peak_bytes == 12000
    assert recorder.trace.end_bytes == 6000
    del a, c


def test_peak_is_never_below_the_start() -> None:
    with Recorder(CPU) as recorder:
        pass
    assert recorder.trace.peak_bytes == 0
    assert recorder.trace.end_bytes == 0


def test_markers_cut_the_trace() -> None:
    with Recorder(CPU) as recorder:
        a = torch.empty(100)
        recorder.mark("one")
        b = torch.empty(1000)
        del b
        recorder.mark("two")
        c = torch.empty(10)
        recorder.mark("one")
    first, second = recorder.trace.named("one")
    (middle,) = recorder.trace.named("two")
    assert (first.live_bytes, first.peak_bytes) == (400, 4400)
    assert (middle.live_bytes, middle.peak_bytes) == (400, 440)
    assert (second.live_bytes, second.peak_bytes) == (440, 440)
    assert recorder.trace.segments[0].name == "start"
    del a, c


def test_backward_is_seen() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Recorder(CPU) as recorder:
        (x * 2.0).sum().backward()
    assert recorder.trace.peak_bytes >= 4000
    assert recorder.trace.end_bytes == 4000


def test_matmul_transients_are_exact() -> None:
    a, b = torch.ones(64, 32), torch.ones(32, 16)
    with Recorder(CPU) as recorder:
        c = (a @ b).relu()
    assert recorder.trace.peak_bytes == 2 * 64 * 16 * 4
    assert recorder.trace.end_bytes == 64 * 16 * 4
    del c


def test_storage_bytes_counts_a_base_once_and_whole() -> None:
    base = torch.empty(10, 10)
    assert storage_bytes([base, base[3:], base.t(), base[0].expand(5, 10)]) == 400
    assert storage_bytes([base[:1]]) == 400
    assert storage_bytes(torch.empty(5) for _ in range(3)) == 60
