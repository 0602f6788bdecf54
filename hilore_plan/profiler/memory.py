"""Bytes of device memory: what is live, and the peak of a piece of work, split at markers.

On a CPU torch keeps no peak counter, but its profiler reports every allocation and release as a `[memory]` event: their
running sum is the memory in use relative to the start. What was allocated before the recording must not be released
within it: torch does not know the size of such a block and leaves the release out. On CUDA the allocator's own counters
are read at each marker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler import profile as autograd_profile
from torch.autograd.profiler import record_function

_PREFIX = "hilore::"


@dataclass(frozen=True)
class Segment:
    """The time between two markers: its name, the bytes live when it begins, and the peak while it lasts.

    Both count from the start of the recording: 0 is what was live then.
    """

    name: str
    live_bytes: int
    peak_bytes: int


@dataclass
class Trace:
    """What a recording saw: `segments` in order of time, the first one named `start`."""

    segments: tuple[Segment, ...] = field(default_factory=tuple)
    end_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The highest bytes in use above the start of the recording; never below 0."""
        return max(0, *(segment.peak_bytes for segment in self.segments))

    def named(self, name: str) -> list[Segment]:
        """Every segment that begins at a marker called `name`, or `name` and a colon and more."""
        return [segment for segment in self.segments if f"{segment.name}:".startswith(f"{name}:")]


class Recorder:
    """Context manager that records the memory of a device; `trace` is there once it is left.

    `mark(name)` inside it ends the running segment and begins another.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.trace = Trace()
        self._profile: autograd_profile | None = None
        self._base_bytes = 0
        self._open = ("start", 0)
        self._segments: list[Segment] = []

    def __enter__(self) -> Recorder:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_bytes = torch.cuda.memory_allocated(self.device)
        else:
            self._profile = autograd_profile(use_kineto=True, profile_memory=True)
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def mark(self, name: str) -> None:
        """Ends the running segment; a new one called `name` begins."""
        if self._profile is None:
            self._close_segment()
            self._open = (name, torch.cuda.memory_allocated(self.device) - self._base_bytes)
        else:
            with record_function(_PREFIX + name):
                pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profile is None:
            self._close_segment()
            end_bytes = torch.cuda.memory_allocated(self.device) - self._base_bytes
            self.trace = Trace(tuple(self._segments), end_bytes)
            return
        self._profile.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None:
            self.trace = _read_events(self._profile)
        self._profile = None

    def _close_segment(self) -> None:
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._base_bytes
        self._segments.append(Segment(*self._open, peak_bytes))
        torch.cuda.reset_peak_memory_stats(self.device)


def _read_events(profile: autograd_profile) -> Trace:
    """Running sum of the memory events, cut at the markers."""
    results = profile.kineto_results
    if results is None:
        return Trace((Segment("start", 0, 0),))
    events = []
    reported: Any = results.events()
    for event in reported:
        name = event.name()
        if name == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU:
            events.append((event.start_ns(), "", event.nbytes()))
        elif name.startswith(_PREFIX):
            events.append((event.start_ns(), name.removeprefix(_PREFIX), 0))
    # A stable sort by time alone: events of one nanosecond keep the order in which they were reported.
    events.sort(key=lambda event: event[0])
    return _cut(events)


def _cut(events: Iterable[tuple[int, str, int]]) -> Trace:
    segments: list[Segment] = []
    name, live, start, peak = "start", 0, 0, 0
    for _, marker, nbytes in events:
        if marker:
            segments.append(Segment(name, start, peak))
            name, start, peak = marker, live, live
        else:
            live += nbytes
            peak = max(peak, live)
    segments.append(Segment(name, start, peak))
    return Trace(tuple(segments), live)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: views of one storage count once, and whole."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())
