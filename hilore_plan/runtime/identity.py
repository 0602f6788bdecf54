"""Which graphs are a block's: those of its kind, for as long as it stays what it is."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from hilore_plan.graph.capture import Forward
from hilore_plan.runtime.attributes import Attributes
from hilore_plan.runtime.state import BlockState
from hilore_plan.runtime.structure import Structure
from hilore_plan.runtime.variants import kind_of

# more than this, and something changes the block in every step: to capture it each time costs more than it gains
MOST_KINDS = 16


class Identity:
    """One block as graphs see it.

    `kind` is equal for blocks that may share graphs; `unfit` says why this one can have none, if so.
    """

    def __init__(self, index: int, block: nn.Module, forward: Forward) -> None:
        self._index = index
        self._block = block
        self._forward = forward
        self._kinds: set[Hashable] = set()
        self._look()

    def _look(self) -> None:
        block = self._block
        self._structure = Structure(block)
        self.state, self.attributes = BlockState(block), Attributes(block)
        self.kind: Hashable = (kind_of(block), self._structure.key(self._forward))
        self._shared = True
        self._kinds.add(self.kind)
        self.unfit = "its parts, or the hooks on them, keep changing" if len(self._kinds) > MOST_KINDS else ""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The block and its submodules."""
        return self._structure.modules

    def follow(self) -> bool:
        """Whether the block is still the same; if not, take it as it is now, for which no trial counts any more."""
        if not self._structure.changed():
            return True
        self._look()
        return False

    def distrust(self, reason: str) -> None:
        """The graph of a block that looked alike does not fit: capture this one by itself; if it was, give up."""
        if self._shared:
            self._shared = False
            self.kind = (self._index, self.kind)
        else:
            self.unfit = reason
