"""Which nodes of a graph are views of which value, and which write into one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

# views that their schema does not show
UNDECLARED_VIEWS = (torch.ops.aten._unsafe_view.default,)


@dataclass
class Aliases:
    """Which storage each tensor node lives in, and who writes into it.

    `base` maps each node to the node that made its storage, `writes` each base to the nodes that write in it, `written`
    each of those to the argument that it writes into and returns.
    """

    base: dict[fx.Node, fx.Node] = field(default_factory=dict)
    writes: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)


def is_tensor_node(node: fx.Node) -> bool:
    """Whether the node's value is a tensor or a sequence of tensors."""
    value = node.meta.get("val")
    return torch.is_tensor(value) or (isinstance(value, (tuple, list)) and any(map(torch.is_tensor, value)))


def find_aliases(graph: fx.Graph) -> Aliases:
    """The aliases of all tensor nodes, from the operators' schemas."""
    aliases = Aliases()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            aliases.base[node] = node
        elif node.op == "call_function" and is_tensor_node(node):
            _add(node, aliases)
    return aliases


def _add(node: fx.Node, aliases: Aliases) -> None:
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        # an output of a multi-output op is a value of its own; a part of a split is a view
        aliases.base[node] = node if aliases.base[source] is source else aliases.base[source]
        return
    for written in _written_arguments(node):
        aliases.writes.setdefault(aliases.base[written], []).append(node)
        aliases.written.setdefault(node, written)
    viewed = _viewed_arguments(node)
    aliases.base[node] = aliases.base[viewed[0]] if viewed else node


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node's op writes into."""
    return [value for info, value in _aliased_arguments(node) if info.is_write]


def _viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node's result is a view of."""
    if node.target in UNDECLARED_VIEWS:
        return list(node.all_input_nodes[:1])
    schema = getattr(node.target, "_schema", None)
    returned = [value.alias_info for value in schema.returns if value.alias_info] if schema else []
    names = {name for info in returned for name in info.before_set}
    # `split` and its like return `Tensor(a)[]`, whose alias set comes without its name: any aliased argument it is
    unnamed = any(not info.before_set for info in returned)
    return [value for info, value in _aliased_arguments(node) if unnamed or info.before_set & names]


def _aliased_arguments(node: fx.Node) -> Iterator[tuple[Any, fx.Node]]:
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema else ()):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if argument.alias_info is not None and isinstance(item, fx.Node):
                yield argument.alias_info, item
