"""Where a measurement is made: versions, device, threads."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch

from hilore_plan.errors import DeviceError
from hilore_plan.schema.record import Environment


def resolve_device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        DeviceError: it is unknown or not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {name!r}", "give cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"there is no device {name!r} on this machine", "give --device cpu")
    return device


def describe_environment(device: torch.device) -> Environment:
    """The environment of this process, for a document."""
    return Environment(
        hilore=_version("hilore-plan") or "unknown",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=_version("transformers"),
        device=device.type,
        device_name=_device_name(device),
        threads=torch.get_num_threads(),
        platform=f"{platform.system()} {platform.machine()}",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
