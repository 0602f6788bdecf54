"""Optional packages: imported where they are needed, and asked for in one line where they are missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from hilore_plan.errors import UsageError

_EXTRA_OF = {"transformers": "hf", "gguf": "hf", "safetensors": "hf", "peft": "trl", "trl": "trl", "accelerate": "trl"}


def require(package: str, purpose: str) -> ModuleType:
    """Imports `package` and returns it.

    Raises:
        UsageError: the package isn't installed; the hint is the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = error.name or package
        extra = _EXTRA_OF.get(missing.partition(".")[0])
        wanted = f"'hilore-plan[{extra}]'" if extra else missing
        raise UsageError(f"{purpose} needs the package {missing!r}", f"pip install {wanted}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or advice from transformers inside; errors still show."""
    logging = require("transformers", "loading a model").utils.logging
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
