"""What starting costs: help is immediate, and files are read and plans made without torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Run

HEAVY = ("torch", "pandas", "transformers", "trl", "peft", "triton", "matplotlib")
WITHOUT = f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\nassert not loaded, loaded"


@pytest.mark.speed
def test_help_is_there_within_half_a_second() -> None:
    best_seconds = min(_timed("--help") for _ in range(5))
    assert best_seconds <= 0.5


def _timed(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "hilore_plan", *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def test_help_loads_nothing_heavy(fresh_hilore: Run) -> None:
    done = fresh_hilore(
        "--help", after=WITHOUT + "\nassert 'pydantic' not in sys.modules and 'rich' not in sys.modules"
    )
    assert done.code == 0, done.err
    for word in ("profile", "plan", "apply", "show", "bench", "MODEL"):
        assert word in done.out


def test_no_arguments_are_a_call_for_help(fresh_hilore: Run) -> None:
    done = fresh_hilore()
    assert done.code == 0
    assert done.out.startswith("Usage: hilore")


def test_planning_needs_no_torch(fresh_hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    done = fresh_hilore(
        "plan", profile_file, "--budget", "1.05x-gc", "-o", tmp_path / "out.json", "--no-verify", after=WITHOUT
    )
    assert done.code == 0, done.err
    assert (tmp_path / "out.json").exists()


def test_showing_needs_no_torch(fresh_hilore: Run, plan_file: Path, profile_file: Path) -> None:
    for arguments in ((plan_file, "--profile", profile_file), (profile_file,)):
        done = fresh_hilore("show", *arguments, after=WITHOUT)
        assert done.code == 0, done.err


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    done = subprocess.run(
        [sys.executable, "-m", "hilore_plan", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"hilore {version('hilore-plan')}\n"
