"""Recovery programs: the sub-graphs that rebuild the missing slots, one per stage of backward.

A program reads parameters (live), what is kept, and what an earlier stage has computed; it runs each op at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hilore_plan.errors import CaptureError
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.graph.sizes import Number, Shapes, is_symbolic


@dataclass(frozen=True)
class Program:
    """One stage's program: `run(*sizes, *state, *sources, *carried)` returns the slots and then what is carried on.

    `sizes` evaluates the symbolic sizes it needs, `state` are indices into the block's state, `sources` the
    kept values that it reads, `carried` the values that an earlier stage has computed, `slots` the slots it
    rebuilds, `carries` the values it computes for later stages. `ops` are the ops that it runs.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    sizes: Callable[[Shapes], tuple[Number, ...]]
    state: tuple[int, ...]
    sources: tuple[int, ...]
    carried: tuple[int, ...]
    slots: tuple[int, ...]
    carries: tuple[int, ...]
    ops: tuple[str, ...]


def recovery_programs(graph: BlockGraph, kept: Iterable[int]) -> tuple[Program | None, ...]:
    """A program for each stage (None where nothing is missing), given the kept values.

    Raises:
        CaptureError: a missing slot depends on an op that cannot run again.
    """
    kept = frozenset(kept)
    slices = _slices(graph, kept)
    return tuple(_build(graph, kept, stage, slices) if slices[stage].slots else None for stage in range(graph.stages))


def unrecoverable(graph: BlockGraph, kept: Iterable[int]) -> set[int]:
    """Values with slots that can be rebuilt from `kept` by no program, so that they have to be kept as well."""
    kept = set(kept)
    reach = {i for i, value in enumerate(graph.values) if value.kind == "parameter"} | kept
    for op in graph.ops:
        if op.recomputable and all(value in reach for value in op.inputs):
            reach.update(op.outputs)
    return {slot.value for slot in graph.slots if slot.value not in reach}


@dataclass
class _Slice:
    """What one stage computes: the slots it is asked for, and the nodes that run for them."""

    slots: list[int]
    nodes: set[fx.Node]
    needs: set[int]
    makes: set[int]


def _slices(graph: BlockGraph, kept: frozenset[int]) -> list[_Slice]:
    free = kept | {i for i, value in enumerate(graph.values) if value.kind == "parameter"}
    made: set[int] = set()
    slices = []
    for stage in range(graph.stages):
        slots = [i for i, slot in enumerate(graph.slots) if slot.stage == stage and slot.value not in free]
        piece = _slice(graph, slots, free | made)
        made |= piece.makes
        slices.append(piece)
    return slices


def _slice(graph: BlockGraph, slots: list[int], available: frozenset[int] | set[int]) -> _Slice:
    nodes: set[fx.Node] = set()
    needs: set[int] = set()
    pending = [graph.slots[slot].node for slot in slots]
    while pending:
        node = graph.seen_as(pending.pop())
        if node in nodes or is_symbolic(node):
            continue
        value = graph.value_of.get(node)
        if value is not None and value in available and graph.values[value].node is node:
            needs.add(value)
            continue
        nodes.add(node)
        pending += node.all_input_nodes
    makes = {value for op in graph.ops if op.node in nodes for value in op.outputs}
    for op in graph.ops:
        if op.node in nodes and not op.recomputable:
            raise CaptureError(f"{op.name} cannot run a second time")
    return _Slice(slots, nodes, needs, makes)


def _build(graph: BlockGraph, kept: frozenset[int], stage: int, slices: Sequence[_Slice]) -> Program:
    piece = slices[stage]
    later = set().union(*(s.needs for s in slices[stage + 1 :]))
    carries = sorted(piece.makes & later)
    state = sorted(v for v in piece.needs if graph.values[v].kind == "parameter" and graph.values[v].place is not None)
    sources = sorted(piece.needs & kept)
    carried = sorted(piece.needs - kept - {v for v in piece.needs if graph.values[v].kind == "parameter"})
    # one output of an op may be needed here and another only later
    nodes = piece.nodes | {graph.values[value].node for value in carries}
    order = [node for node in graph.capture.module.graph.nodes if node in nodes]
    sizes = list(dict.fromkeys(n for node in order for n in node.all_input_nodes if is_symbolic(n)))

    program, copies = fx.Graph(), {}
    for node in sizes:
        copies[node] = program.placeholder(node.name)
    for value in (*state, *sources, *carried):
        node = graph.values[value].node
        copies[node] = program.placeholder(node.name)
    for value in piece.needs:
        node = graph.values[value].node
        if node not in copies:
            copies[node] = program.node_copy(node)
    for node in order:
        copies[node] = program.node_copy(node, lambda source: copies[graph.seen_as(source)])
    wanted = [graph.slots[slot].node for slot in piece.slots] + [graph.values[value].node for value in carries]
    program.output(tuple(copies[graph.seen_as(node)] for node in wanted))
    return Program(
        run=fx.GraphModule(graph.capture.module, program).forward,
        sizes=graph.sizes.function([node.meta["val"] for node in sizes]),
        state=tuple(_place(graph, value) for value in state),
        sources=tuple(sources),
        carried=tuple(carried),
        slots=tuple(piece.slots),
        carries=tuple(carries),
        ops=tuple(op.name for op in graph.ops if op.node in piece.nodes),
    )


def _place(graph: BlockGraph, value: int) -> int:
    place = graph.values[value].place
    assert place is not None
    return place
