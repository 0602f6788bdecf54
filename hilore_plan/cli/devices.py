"""Which devices are on this machine, and how much memory they have."""

from __future__ import annotations

import os

from hilore_plan.errors import DeviceError


def check_device(device: str) -> None:
    """Make sure that a device is there. Imports torch for anything but the CPU.

    Raises:
        DeviceError: if it is not, or if it is no device that hilore measures on.
    """
    if device != "cpu":
        from hilore_plan.profiler.environment import resolve_device

        resolve_device(device)


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
