"""The Triton kernels in Triton's interpreter, which is chosen when triton is imported: hence a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_kernels_give_what_the_formulas_give() -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-W", "error", str(HERE / "triton_check.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.soak
def test_kernels_compile_for_cuda_devices(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "triton_compile.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


def test_triton_is_not_imported_by_the_registry() -> None:
    code = "import sys, hilore_plan.codecs.registry; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
