"""The benchmarks that check limits and devices, as far as a test has time for them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_command_that_takes_longer_than_its_limit_is_told() -> None:
    overhead = load("overhead")
    slow, quick = (overhead.command("hilore --version", ["--version"], limit) for limit in (0.0, 600.0))
    assert not slow.met
    assert "NOT MET" in str(slow)
    assert quick.met
    assert quick.cpu_seconds > 0
    assert 0 < quick.seconds < 600


@pytest.mark.setups
def test_gpu_checks_that_do_not_fit_into_the_time_are_named() -> None:
    done = run("--seconds", "0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("no CUDA device")
    assert lines[-1].startswith("failed: nothing; left out: kernels, LoRA: profile and plans,")
    assert lines[-1].endswith("full: hilore bench")


@pytest.mark.soak
def test_gpu_checks_pass_on_a_cpu() -> None:
    done = run("--seconds", "1200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT MET" not in done.stdout
    assert done.stdout.splitlines()[-1] == "failed: nothing; left out: nothing"
