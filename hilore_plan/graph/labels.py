"""Which submodule made which node: names for the graph that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Labels:
    """Writes `node.meta["path"]` and `node.meta["module"]` as the traced code enters and leaves modules."""

    def __init__(self, block: nn.Module) -> None:
        self._paths = {id(module): name for name, module in block.named_modules()}
        self._stack: list[nn.Module] = [block]
        self._last: fx.Node | None = None

    @contextmanager
    def follow(self, graph: fx.Graph) -> Iterator[None]:
        """Label the nodes that are added to `graph` in this context."""
        self._last = last_node(graph)

        def enter(module: nn.Module, _args: Any) -> None:
            self._label(graph)
            if id(module) in self._paths:
                self._stack.append(module)

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            self._label(graph)
            if self._stack[-1] is module and len(self._stack) > 1:
                self._stack.pop()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
            self._label(graph)
        finally:
            for hook in hooks:
                hook.remove()

    def _label(self, graph: fx.Graph) -> None:
        module = self._stack[-1]
        node, end = last_node(graph), self._last
        while node is not end:
            node.meta["path"] = self._paths[id(module)]
            node.meta["module"] = type(module).__name__
            node = node.prev
        self._last = last_node(graph)


def last_node(graph: fx.Graph) -> fx.Node:
    """The newest node of a graph that is being traced (its root if it has none)."""
    return graph._root.prev
