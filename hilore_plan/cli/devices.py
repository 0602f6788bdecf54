"""Which devices are on this machine, and how much memory they have."""

from __future__ import annotations

import os
import re

from hilore_plan.errors import DeviceError


def check_device(device: str) -> None:
    """Make sure that a device is there. Imports torch for anything but the CPU.

    Raises:
        DeviceError: if it is not, or if it is no device that hilore measures on.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise DeviceError(f"there is no device {device!r}", hint="hilore measures on cpu, cuda or cuda:N")
    if device != "cpu":
        _check_cuda(device, int(found[1] or 0))


def device_there(device: str) -> bool:
    """Whether a device is on this machine."""
    try:
        check_device(device)
    except DeviceError:
        return False
    return True


def device_memory_bytes(device: str) -> int | None:
    """All memory of a device, or None if it is not on this machine. For the CPU that is the machine's memory."""
    if not device_there(device):
        return None
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def _check_cuda(device: str, index: int) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        there = (
            f"this machine has {count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device is here"
        )
        raise DeviceError(f"device {device!r} is not there: {there}", hint="choose another with --device, such as cpu")
