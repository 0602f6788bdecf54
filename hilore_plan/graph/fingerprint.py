"""A hash of what a block computes, equal on every machine and at every size."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from hilore_plan.graph.recovery_units import BlockGraph


def graph_hash(graph: BlockGraph) -> str:
    """The first 16 hex digits of SHA-256 over the graph's ops, their arguments, and the slots by name."""
    digest = hashlib.sha256()
    for op in graph.ops:
        line = f"{op.name} {op.node.target} {_render(op.node.args, graph)} {_render(op.node.kwargs, graph)}\n"
        digest.update(line.encode())
    for slot in graph.slots:
        digest.update(f"slot {graph.values[slot.value].name}\n".encode())
    return digest.hexdigest()[:16]


def _render(argument: Any, graph: BlockGraph) -> str:
    if isinstance(argument, fx.Node):
        value = graph.value_of.get(argument)
        if value is None:
            return "size"
        base = graph.values[value]
        return base.name if argument is base.node else f"{argument.target}({_render(argument.args, graph)})"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_render(item, graph) for item in argument) + "]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key}: {_render(item, graph)}" for key, item in sorted(argument.items())) + "}"
    # a device's index differs between processes of one run
    return argument.type if isinstance(argument, torch.device) else repr(argument)
