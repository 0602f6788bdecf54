"""Gradients that can be compared bit for bit on a GPU, where some kernels add up in the order in which threads arrive.

Backward of fused attention is one of them: without this, no two runs of the same model agree, plan or not. The kernels
that do agree are slower and take more memory, so that nothing is timed and no peak is taken with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hilore_plan.errors import RefusedError

# cuBLAS is repeatable only with work space of a fixed size, read once when a process first multiplies
_WORK_SPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def repeatable_environment() -> dict[str, str]:
    """The environment variables that a process needs for `repeatable`; on a CPU they mean nothing."""
    return dict(_WORK_SPACE)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Only kernels that give the same bits every time run within; a CPU's always do.

    Raises:
        RefusedError: the model runs an op that has no such kernel.
    """
    if device.type != "cuda":
        yield
        return
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if "deterministic" not in text:
            raise
        raise RefusedError(f"gradients cannot be compared on this device: {text}", "compare them on a CPU") from error
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        settings.fill_uninitialized_memory = filled
