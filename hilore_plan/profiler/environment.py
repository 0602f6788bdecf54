"""What is measured, and where: the model, versions, device, threads."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from hilore_plan.errors import DeviceError
from hilore_plan.schema.record import Environment, Model


def resolve_device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        DeviceError: it is unknown or not there.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        raise DeviceError(f"unknown device {name!r}", "give cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and int(found[1] or 0) >= count:
        there = f"{count or 'no'} CUDA device{'' if count == 1 else 's'}"
        raise DeviceError(f"there is no device {name!r}: this machine has {there}", "give another device, such as cpu")
    return torch.device(name)


def describe_environment(device: torch.device) -> Environment:
    """The environment of this process, for a document."""
    return Environment(
        hilore=_version("hilore-plan") or "unknown",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=_version("transformers"),
        device=str(device),  # with its number: a plan is verified where its profile was measured
        device_name=_device_name(device),
        threads=torch.get_num_threads(),
        platform=f"{platform.system()} {platform.machine()}",
    )


def describe_model(model: nn.Module) -> Model:
    """The model's class and sizes."""
    parameters = list(model.parameters())
    return Model(
        name=type(model).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
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
