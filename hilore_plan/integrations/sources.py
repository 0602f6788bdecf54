"""Models from outside: a hub id, a local directory, or a factory function named `package.module:factory`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hilore_plan.errors import FileError, HiloreError, UsageError
from hilore_plan.integrations.extras import quiet_transformers, require

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_factory(source: str) -> bool:
    """Whether `source` looks like `package.module:factory`."""
    return _FACTORY.fullmatch(source) is not None


def is_path(source: str) -> bool:
    """Whether `source` can only be meant as a path, or is one that exists."""
    return source.startswith((".", "~", os.sep)) or source.count("/") > 1 or Path(source).exists()


def from_directory(path: Path, *, dtype: torch.dtype, attention: str) -> tuple[nn.Module, Any]:
    """Model and tokenizer (None where there is none) from a directory that `save_pretrained` wrote.

    Raises:
        FileError: there is no such directory, or it holds no model.
    """
    if not path.is_dir():
        raise FileError(f"no model directory {path}", "give a directory with config.json and weights, or a hub id")
    if not (path / "config.json").is_file():
        raise FileError(f"{path} holds no config.json", "give a directory that save_pretrained() wrote")
    return _load(str(path), dtype, attention)


def from_hub(name: str, *, dtype: torch.dtype, attention: str) -> tuple[nn.Module, Any]:
    """Model and tokenizer from the Hugging Face hub or its local cache.

    Raises:
        FileError: the hub doesn't answer, or knows no such model.
    """
    return _load(name, dtype, attention)


def from_factory(source: str, *, dtype: torch.dtype) -> nn.Module:
    """What `factory()` of `package.module:factory` returns, in `dtype`; the current directory is searched as well.

    Raises:
        UsageError: the module or the function isn't there, or it returns no `nn.Module`.
    """
    module_name, _, attribute = source.partition(":")
    factory = getattr(_import(module_name, source), attribute, None)
    if not callable(factory):
        raise UsageError(f"module {module_name!r} has no function {attribute!r}", "give package.module:factory")
    model = factory()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source} returned {type(model).__name__}, not a torch.nn.Module", "return the model itself")
    return model.to(dtype)


def _import(name: str, source: str) -> ModuleType:
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = "give package.module:factory; the module must be importable from the current directory"
        raise UsageError(f"cannot import {error.name!r} for the model {source!r}", hint) from error
    finally:
        if added:
            sys.path.remove(here)


def _load(name: str, dtype: torch.dtype, attention: str) -> tuple[nn.Module, Any]:
    transformers = require("transformers", f"the model {name!r}")
    with quiet_transformers():
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention)
        except (OSError, ValueError) as error:
            raise _load_error(name, error) from error
        return model, _tokenizer(transformers, name)


def _tokenizer(transformers: ModuleType, name: str) -> object | None:
    try:
        tokenizer: object = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None  # a profile needs token ids, not text
    return tokenizer


def _load_error(name: str, error: Exception) -> HiloreError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if "attention implementation" in reason:
        return UsageError(f"{name!r} doesn't run with this attention: {reason}", "give --attn eager")
    if is_path(name):
        return FileError(f"cannot load a model from {name}: {reason}", "is the directory complete?")
    if not isinstance(error, OSError):
        return UsageError(f"cannot load {name!r}: {reason}", "hilore needs a causal language model")
    hint = "check the name and the network, or give a local directory or builtin:NAME; gated models need a login"
    return FileError(f"cannot load {name!r} from the Hugging Face hub: {reason}", hint)
