"""How command lines are run in tests: in this process, or in one of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import samples
from command_line import Outcome, Run

from hilore_plan.cli.app import run
from hilore_plan.profiler.malloc import malloc_environment
from hilore_plan.schema.io import save


@pytest.fixture
def hilore(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process; the allocator's settings are there, so that it need not start anew."""
    for name, value in malloc_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def fresh_hilore() -> Run:
    """Run a command line as a user would, in a new process. `before` is Python code that runs first."""

    def call(*arguments: object, before: str = "", after: str = "") -> Outcome:
        steps = ("import sys", before, "from hilore_plan.cli.app import run", "code = run(sys.argv[1:])", after)
        program = "\n".join([*steps, "sys.exit(code)"])
        command = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    """A profile on disk."""
    save(samples.profile(), tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan on disk."""
    save(samples.plan(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def bench_file(tmp_path: Path) -> Path:
    """A bench on disk."""
    save(samples.bench(), tmp_path / "bench.json")
    return tmp_path / "bench.json"
