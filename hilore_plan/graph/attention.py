"""Fused attention as an op: it saves its output and the log-sum-exp of its scores, which belong to exact q and k."""

from __future__ import annotations

from torch import fx

from hilore_plan.graph.names import op_label
from hilore_plan.graph.recovery_units import BlockGraph, GraphOp


def scored(op: GraphOp, graph: BlockGraph) -> tuple[int, ...]:
    """The values of q and k, which the scores are made of; empty if the op is not fused attention."""
    return _arguments(op, graph)[:2]


def weighted(op: GraphOp, graph: BlockGraph) -> tuple[int, ...]:
    """The value of v, which the scores weight; empty if they depend on it, too, or if this is not fused attention."""
    query, key, value = _arguments(op, graph) or (None, None, None)
    return () if value is None or value in (query, key) else (value,)


def _arguments(op: GraphOp, graph: BlockGraph) -> tuple[int, ...]:
    if op_label(op.node) != "sdpa":
        return ()
    return tuple(graph.value_of[node] for node in op.node.args[:3] if isinstance(node, fx.Node))
