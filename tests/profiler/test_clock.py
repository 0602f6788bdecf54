"""Seconds of work that goes through memory, taken as a step would."""

from __future__ import annotations

import time

import torch

from hilore_plan.profiler import clock

CPU = torch.device("cpu")


def test_each_run_comes_after_a_while_of_compute() -> None:
    began: list[float] = []
    ended: list[float] = []

    def work() -> None:
        began.append(time.perf_counter())
        time.sleep(0.002)
        ended.append(time.perf_counter())

    seconds = clock.seconds_amid_compute(work, CPU, repeats=3)
    assert len(began) == 4  # one to warm up
    pauses = [start - end for start, end in zip(began[1:], ended, strict=False)]
    assert min(pauses) >= clock.COMPUTE_SECONDS
    assert seconds >= 0.002
    assert seconds <= max(end - start for start, end in zip(began, ended, strict=True)) + 0.001
