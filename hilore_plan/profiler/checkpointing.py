"""Gradient checkpointing of whole blocks, put on and taken off: the reference that every plan is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def checkpointed(blocks: Sequence[nn.Module], context: Callable[[], Any] | None = None) -> Iterator[None]:
    """Every block's forward runs under torch's non-reentrant checkpoint while the context lasts.

    The forward is wrapped inside the module's own hooks, as transformers does it, and restored exactly.

    Args:
        blocks: the modules to checkpoint.
        context: `context_fn` of the checkpoint, for selective checkpointing.
    """
    options = {} if context is None else {"context_fn": context}
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = _wrapped(block.forward, options)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            block.__dict__.pop("forward")
            if forward is not None:
                block.forward = forward


def _wrapped(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: object, **kwargs: object) -> object:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return run
