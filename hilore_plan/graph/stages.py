"""Cut a block's backward into stages, so that what is rebuilt for one is released before the next begins.

Backward runs through the graph from its end. A cut is good where little has to be handed from one side to the other
(between attention and MLP that is the one residual stream) while both sides hold a fair share of the saved bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hilore_plan.graph.capture import Capture

if TYPE_CHECKING:
    from hilore_plan.graph.recovery_units import GraphOp

LEAST_SHARE = 0.2


def cut_into_stages(
    capture: Capture,
    ops: Sequence[GraphOp],
    fakes: Sequence[torch.Tensor],
    slot_values: Sequence[int],
    stages: int,
) -> list[int]:
    """The stage of each slot; stage 0 is the one that backward reaches first.

    Args:
        capture: the captured block.
        ops: the graph's ops in order.
        fakes: the symbolic tensor of each value.
        slot_values: the value that each slot is a view of.
        stages: 1 or 2.
    """
    order = {node: i for i, node in enumerate(capture.module.graph.nodes)}
    saved_at = [order[slot.saved] for slot in capture.slots]
    cut = _best_cut(order, ops, [hint_bytes(fake) for fake in fakes], saved_at, slot_values) if stages > 1 else None
    if cut is None:
        return [0] * len(saved_at)
    return [0 if position >= cut else 1 for position in saved_at]


def hint_bytes(fake: torch.Tensor) -> int:
    """Bytes of a symbolic tensor at the sizes of the captured call; 0 where they depend on data."""
    return math.prod(_hint(size) for size in fake.shape) * fake.dtype.itemsize


def _hint(size: Any) -> int:
    node = getattr(size, "node", None)
    return int(size) if node is None else int(node.maybe_as_int() or node._hint or 0)


def _best_cut(
    order: dict[torch.fx.Node, int],
    ops: Sequence[GraphOp],
    sizes: Sequence[int],
    saved_at: Sequence[int],
    slot_values: Sequence[int],
) -> int | None:
    made_at = {value: order[op.node] for op in ops for value in op.outputs}
    total = _slot_bytes(sizes, slot_values, made_at)
    best: tuple[int, int, int] | None = None
    for op in ops:
        cut = order[op.node]
        late = _slot_bytes(sizes, (v for v, at in zip(slot_values, saved_at, strict=True) if at >= cut), made_at)
        if not LEAST_SHARE * total <= late <= (1 - LEAST_SHARE) * total:
            continue
        crossing = {v for o in ops if order[o.node] >= cut for v in o.inputs if made_at.get(v, cut) < cut}
        score = (sum(sizes[value] for value in crossing), abs(total - 2 * late), cut)
        best = score if best is None else min(best, score)
    return None if best is None else best[2]


def _slot_bytes(sizes: Sequence[int], values: object, made_at: dict[int, int]) -> int:
    return sum(sizes[value] for value in set(values) if value in made_at)  # type: ignore[call-overload]
