"""Starting anew with the allocator's settings: once, in the same process, with the same arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hilore_plan.profiler.malloc import malloc_environment

PROGRAM = """
import os, sys
from hilore_plan.profiler.malloc import reexec_with_malloc_settings
print("start", os.getpid(), *sys.argv[1:])
reexec_with_malloc_settings()
print("settings", os.environ.get("MALLOC_TRIM_THRESHOLD_"))
"""


def _lines(**settings: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, "--flag", "a b"]
    done = subprocess.run(command, env={**environment, **settings}, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not malloc_environment(), reason="the settings are glibc's")
def test_it_starts_anew_once_with_the_same_arguments() -> None:
    first, second, settings = _lines()
    assert first == second
    assert first.endswith(" --flag a b")
    assert settings == f"settings {malloc_environment()['MALLOC_TRIM_THRESHOLD_']}"


def test_it_goes_on_where_the_settings_are_there() -> None:
    assert len(_lines(**malloc_environment())) == 2


@pytest.mark.skipif(not malloc_environment(), reason="the settings are glibc's")
def test_a_users_own_value_is_kept() -> None:
    assert _lines(MALLOC_TRIM_THRESHOLD_="123")[-1] == "settings 123"
