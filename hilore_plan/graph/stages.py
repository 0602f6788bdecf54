"""Cut a block's backward into stages, so that what is rebuilt for one is released before the next begins.

Backward runs through the graph from its end. A cut is good where little has to be handed from one side to the other
(between attention and MLP that is the one residual stream) while both sides hold a fair share of the saved bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    elements = 1
    for size in fake.shape:
        hint = size if isinstance(size, int) else size.node.maybe_as_int() or size.node._hint
        elements *= int(hint or 0)
    return elements * fake.dtype.itemsize


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
        best = min(best or score, score)
    return best[2] if best else None


def _slot_bytes(sizes: Sequence[int], values: object, made_at: dict[int, int]) -> int:
    return sum(sizes[value] for value in set(values) if value in made_at)  # type: ignore[call-overload]
