"""The block graph: a capture read as values, ops and slots, with what can be kept and what can be run again.

Slots that are views of one storage are one value. A value that autograd saves a view of is a recovery unit; so is an
argument of the block, from which everything can be rebuilt.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import fx, nn

from hilore_plan.graph.aliases import Aliases, find_aliases, is_tensor_node
from hilore_plan.graph.capture import Capture, block_state
from hilore_plan.graph.names import op_label, op_name, output_name
from hilore_plan.graph.randomness import is_repeatable
from hilore_plan.graph.sizes import Sizes, is_unbacked
from hilore_plan.graph.stages import cut_into_stages

Kind = Literal["op", "input", "parameter"]
NARROW_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GraphValue:
    """One storage of the graph. `place` is its index among the call's tensors or the block's state, where it is one.

    `slots` are the saved tensors that are views of it, `narrow` the dtype to which it can be narrowed without loss.
    """

    name: str
    kind: Kind
    node: fx.Node
    place: int | None = None
    slots: tuple[int, ...] = ()
    slot_stages: tuple[int, ...] = ()
    narrow: torch.dtype | None = None

    @property
    def fake(self) -> torch.Tensor:
        """The value's symbolic shape, strides and dtype."""
        fake: torch.Tensor = self.node.meta["val"]
        return fake

    @property
    def keepable(self) -> bool:
        """Whether the value is a recovery unit."""
        return self.kind == "input" or (self.kind == "op" and bool(self.slots))


@dataclass(frozen=True)
class GraphOp:
    """One op: the node that runs it, and the values that it reads and makes."""

    name: str
    node: fx.Node
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool


@dataclass(frozen=True)
class GraphSlot:
    """One saved tensor: its node, the value that it is a view of, and the stage of backward that asks for it."""

    node: fx.Node
    value: int
    stage: int


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """A captured block: values in the order of their making, ops in the order of execution, slots in that of saving.

    `value_of` says in which value each tensor node lives, `written` into which node an in-place op writes.
    """

    capture: Capture
    values: tuple[GraphValue, ...]
    ops: tuple[GraphOp, ...]
    slots: tuple[GraphSlot, ...]
    stages: int
    value_of: dict[fx.Node, int]
    written: dict[fx.Node, fx.Node]

    @cached_property
    def sizes(self) -> Sizes:
        """Evaluates the graph's symbolic sizes."""
        return Sizes(self.capture.shape_env, [node.meta["val"] for node in self.capture.input_nodes])

    def seen_as(self, node: fx.Node) -> fx.Node:
        """The node that stands for `node` once its value is complete: an in-place op returns what it wrote into."""
        while node in self.written:
            node = self.written[node]
        return node

    @cached_property
    def index(self) -> dict[str, int]:
        """Values by name."""
        return {value.name: i for i, value in enumerate(self.values)}


def block_graph(capture: Capture, stages: int = 2) -> BlockGraph:
    """Read a capture as values, ops and slots, its backward divided into at most `stages` stages."""
    graph = capture.module.graph
    aliases = find_aliases(graph)
    bases = _bases(aliases)
    number = {node: i for i, node in enumerate(bases)}
    value_of = {node: number[base] for node, base in aliases.base.items() if base in number}
    slot_values = [value_of[slot.node] for slot in capture.slots]
    frozen = _frozen(capture, aliases)
    ops = tuple(_ops(graph, value_of, frozen, aliases))
    slot_stages = cut_into_stages(capture, ops, [base.meta["val"] for base in bases], slot_values, stages)
    names = _names(capture, bases, ops)
    values = tuple(
        _value(i, node, names[i], capture, slot_values, slot_stages, aliases) for i, node in enumerate(bases)
    )
    slots = tuple(GraphSlot(s.node, v, p) for s, v, p in zip(capture.slots, slot_values, slot_stages, strict=True))
    return BlockGraph(capture, values, ops, slots, max(slot_stages, default=0) + 1, value_of, aliases.written)


def parameter_descriptions(block: nn.Module) -> dict[str, str]:
    """What each parameter and buffer looks like: `bfloat16[2560, 512] trainable`."""
    return {name: _describe(tensor) for name, tensor in block_state(block).items()}


def _describe(tensor: torch.Tensor) -> str:
    trainable = " trainable" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trainable}"


def _bases(aliases: Aliases) -> list[fx.Node]:
    """The nodes that make a storage of their own, each a tensor (not the tuple of a multi-output op)."""
    own = [node for node, base in aliases.base.items() if base is node]
    return [node for node in own if torch.is_tensor(node.meta.get("val"))]


def _ops(graph: fx.Graph, value_of: dict[fx.Node, int], frozen: set[fx.Node], aliases: Aliases) -> Iterable[GraphOp]:
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or not is_tensor_node(node):
            continue
        if aliases.base[node] is not node and node not in aliases.written:
            continue  # a view
        made = [node] if torch.is_tensor(node.meta["val"]) else [user for user in node.users if user in value_of]
        inputs = tuple(dict.fromkeys(value_of[n] for n in node.all_input_nodes if n in value_of))
        outputs = tuple(dict.fromkeys(value_of[n] for n in made))
        yield GraphOp(op_name(node, seen), node, inputs, outputs, is_repeatable(node) and node not in frozen)


def _frozen(capture: Capture, aliases: Aliases) -> set[fx.Node]:
    """Nodes that must not run again: they write, read what is written later, or have sizes that depend on data."""
    order = {node: i for i, node in enumerate(capture.module.graph.nodes)}
    frozen = {node for node in order if is_unbacked(node)}
    for base, writers in aliases.writes.items():
        last = max(order[writer] for writer in writers)
        outlives = base.op in ("placeholder", "get_attr")
        # where one of several outputs is written into, the op that made it would give it as it was before
        frozen |= {base, *writers, *(base.all_input_nodes if base.target is operator.getitem else ())}
        for node, position in order.items():
            reads = any(aliases.base.get(source) is base for source in node.all_input_nodes)
            if reads and aliases.base.get(node) is not base and (outlives or position < last):
                frozen.add(node)
    return frozen


def _names(capture: Capture, bases: list[fx.Node], ops: tuple[GraphOp, ...]) -> list[str]:
    names = [f"constant.{i}" for i in range(len(bases))]
    position = {node: i for i, node in enumerate(bases)}
    for node, name in zip(capture.state_nodes, capture.state_names, strict=True):
        names[position[node]] = name
    for node, name in zip(capture.input_nodes, capture.input_names, strict=True):
        names[position[node]] = name
    for op in ops:
        single = torch.is_tensor(op.node.meta["val"])
        for value in op.outputs:
            base = bases[value]
            if single and base is op.node:
                names[value] = op.name
            elif not single:
                names[value] = output_name(op.name, op_label(op.node), int(base.args[1]))  # type: ignore[arg-type]
    return names


def _value(
    index: int,
    node: fx.Node,
    name: str,
    capture: Capture,
    slot_values: list[int],
    slot_stages: list[int],
    aliases: Aliases,
) -> GraphValue:
    slots = tuple(i for i, value in enumerate(slot_values) if value == index)
    stages = tuple(slot_stages[i] for i in slots)
    if node in capture.input_nodes:
        return GraphValue(name, "input", node, capture.input_nodes.index(node), slots, stages)
    if node in capture.state_nodes:
        return GraphValue(name, "parameter", node, capture.state_nodes.index(node), slots, stages)
    if node.op == "get_attr":
        return GraphValue(name, "parameter", node, None, slots, stages)
    narrow = None if node in aliases.writes else _narrow_dtype(node)
    return GraphValue(name, "op", node, None, slots, stages, narrow)


def _narrow_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype from which the node is a plain upcast to fp32: narrowing it again loses nothing."""
    if node.target is not torch.ops.aten._to_copy.default or node.meta["val"].dtype != torch.float32:
        return None
    source = node.args[0]
    dtype = source.meta["val"].dtype if isinstance(source, fx.Node) else None
    return dtype if dtype in NARROW_DTYPES else None
