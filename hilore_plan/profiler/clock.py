"""Seconds of a piece of work, with the device's queue drained before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

COMPUTE_SECONDS = 0.01
COMPUTE_SIZE = 512


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was asked; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call of `work`."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def seconds_amid_compute(work: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Median seconds of work that goes through memory, each time after a while of products of matrices, as in a step.

    *Measured* on two cores: int8 of 3.9 M float32 takes 0.9 ms again and again, 1.6 ms after 13 ms of products, and as
    much after 30 ms of Python: it is not the caches, it is that memory has been idle.
    """
    work()
    taken = []
    for _ in range(repeats):
        _compute(device)
        taken.append(seconds_of(work, device))
    return statistics.median(taken)


def _compute(device: torch.device) -> None:
    matrix = torch.ones((COMPUTE_SIZE, COMPUTE_SIZE), device=device)
    end = time.perf_counter() + COMPUTE_SECONDS
    while time.perf_counter() < end:
        matrix @ matrix
        synchronize(device)


def interleaved_seconds(
    works: Sequence[Callable[[], object]], device: torch.device, *, rounds: int, warmups: int = 1
) -> list[list[float]]:
    """Seconds of each of `works` over `rounds`, taken in turn (A B C, A B C, ...) because machines drift.

    Returns:
        One list of `rounds` seconds for each of `works`.
    """
    for _ in range(warmups):
        for work in works:
            work()
    taken = [[seconds_of(work, device) for work in works] for _ in range(rounds)]
    return [list(column) for column in zip(*taken, strict=True)]
