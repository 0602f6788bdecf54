"""Seconds of a piece of work, with the device's queue drained before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


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


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 5, warmups: int = 1) -> float:
    """Median seconds over `repeats` calls after `warmups` calls that do not count."""
    for _ in range(warmups):
        work()
    return statistics.median(seconds_of(work, device) for _ in range(repeats))


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
