"""Which nodes of a graph are views of which value, and which write into one."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

# views that their schema does not show
UNDECLARED_VIEWS = (torch.ops.aten._unsafe_view.default,)


@dataclass
class Aliases:
    """`base` maps each tensor node to the node that made its storage, `writes` each base to the nodes that write in it."""

    base: dict[fx.Node, fx.Node] = field(default_factory=dict)
    writes: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


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
    for written in _arguments(node, written=True):
        aliases.writes.setdefault(aliases.base[written], []).append(node)
    viewed = _arguments(node, written=None)
    aliases.base[node] = aliases.base[viewed[0]] if viewed else node


def _arguments(node: fx.Node, written: bool | None) -> list[fx.Node]:
    """The arguments that the node's op writes into (`written`), or that its result aliases."""
    if node.target in UNDECLARED_VIEWS:
        return [] if written else list(node.all_input_nodes[:1])
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    aliased = [value.alias_info for value in schema.returns if value.alias_info]
    # `split` and its like return `Tensor(a)[]`, whose alias set comes without its name: any aliased argument it is
    returned = {name for info in aliased for name in info.before_set}
    unnamed = any(not info.before_set for info in aliased)
    found = []
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or (written and not info.is_write) or (written is None and not unnamed and not info.before_set & returned):
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        found += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, fx.Node)]
    return found
