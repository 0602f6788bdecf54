"""The ways to run the same actor update: a name, and a context manager that puts the way on a model.

| mode | what it keeps |
| --- | --- |
| `store` | everything, as torch does by itself |
| `gc` | each block's inputs; the block runs again in backward |
| `sac-attention` | `gc`, plus the outputs of attention kernels and of biased matmuls (`addmm`) |
| `sac-matmul` | `gc`, plus the outputs of attention kernels and of every matmul |
| `plan` | what the plan says |
| `exact-plan` | what the planner says for the same budget without risk |
| `greedy` | what the greedy planner says for the same budget and price of risk |
| `compress-int8` | everything that int8 takes in int8, the rest as it is; nothing is recomputed |
| `preprint` | whole blocks: stored, recomputed, or recomputed around one raw fp8 tensor |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hilore_plan.errors import UsageError
from hilore_plan.graph.blocks import find_blocks
from hilore_plan.profiler.checkpointing import checkpointed
from hilore_plan.profiler.step import Enterable
from hilore_plan.schema.plan import Plan

PLAN = "plan"
AGAINST = ("store", "gc", "sac-attention", "sac-matmul")
# plans that are made for the comparison, from the profile
PLANNED = ("exact-plan", "greedy", "compress-int8", "preprint")

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_SAVED = {
    "sac-attention": (*_ATTENTION, "addmm"),
    "sac-matmul": (*_ATTENTION, "addmm", "mm", "bmm", "baddbmm"),
}


def check_modes(names: Sequence[str]) -> None:
    """Raises `UsageError` for a name that is no mode to compare a plan against."""
    for name in names:
        if name not in (*AGAINST, *PLANNED):
            raise UsageError(f"unknown mode {name!r}", f"the modes are {', '.join((*AGAINST, *PLANNED))}")


def mode(name: str, model: nn.Module, plan: Plan | None = None) -> AbstractContextManager[Enterable | None]:
    """Puts mode `name` on `model` while the context lasts, and gives the runtime if the mode has one."""
    if name == "store":
        return nullcontext()
    if name == PLAN or name in PLANNED:
        if plan is None:
            raise UsageError(f"mode {name!r} needs a plan")
        return _planned(model, plan)
    check_modes([name])
    return _checkpointed(model, name)


@contextmanager
def _planned(model: nn.Module, plan: Plan) -> Iterator[Enterable]:
    # The bench may name the runtime only once it is needed: profiling and verification of files do without it.
    from hilore_plan.runtime.attach import apply

    runtime = apply(model, plan)
    try:
        yield runtime
    finally:
        runtime.detach()


@contextmanager
def _checkpointed(model: nn.Module, name: str) -> Iterator[None]:
    blocks = [block for _, block in find_blocks(model)]
    context = partial(create_selective_checkpoint_contexts, saved_ops(name)) if name in _SAVED else None
    with checkpointed(blocks, context):
        yield


def saved_ops(name: str) -> list[Any]:
    """The ATen ops whose outputs mode `name` keeps, as far as this torch has them."""
    packets = [getattr(torch.ops.aten, op, None) for op in _SAVED[name]]
    return [packet.default for packet in packets if packet is not None]
