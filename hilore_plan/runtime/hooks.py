"""The pack hook of one forward of one block: it carries out the recipe, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hilore_plan.errors import RecoveryError
from hilore_plan.runtime.alarm import Alarm, Careful, Ways
from hilore_plan.runtime.frame import Clock, Handle, Owner, Stage, same_strides
from hilore_plan.runtime.kept import Compressed, Kept, Narrowed, Source
from hilore_plan.runtime.recipe import Layout, Recipe, Treatment
from hilore_plan.runtime.state import BlockState


class SlotMismatchError(RecoveryError):
    """The block saves other tensors than its graph says."""


class Packer:
    """Turns the saved tensors of one forward into handles: `pack` is the hook, `seal` ends the forward.

    Stages learn their sources only in `seal`, when all of them have been saved.

    Args:
        tensors: the call's tensor arguments, before the forward.
        alarm: what makes the frame ignore what it compressed.
    """

    __slots__ = ("_careful", "_exact", "_layout", "_next", "_recipe", "_rules", "_sources", "_stages", "_ways")

    def __init__(
        self,
        recipe: Recipe,
        tensors: Sequence[torch.Tensor],
        state: BlockState,
        clock: Clock,
        alarm: Alarm | None = None,
    ) -> None:
        shapes = tuple(tensor.shape for tensor in tensors)
        layout = recipe.layout(shapes)
        self._recipe = recipe
        self._layout = layout
        self._rules = recipe.rules
        self._stages = _new_stages(recipe, layout, state, clock)
        self._ways: Ways | None = None
        self._exact: list[Stage | None] = []
        self._careful: dict[tuple[Owner, int], Careful] = {}
        if alarm is not None and recipe.exact is not None:
            self._exact = _new_stages(recipe.exact, recipe.exact.layout(shapes), state, clock)
            self._ways = Ways(alarm, self._stages, self._exact)
        self._sources: dict[int, Source] = {
            value: Kept(tensors[place], layout.values[value]) for value, place in recipe.read_inputs.items()
        }
        self._next = 0

    def pack(self, tensor: torch.Tensor) -> Handle:
        """The pack hook.

        Raises:
            SlotMismatchError: the block saves something else than its graph says.
        """
        slot = self._next
        self._next = slot + 1
        self._check(slot, tensor)
        owner = self._owner(slot, tensor)
        return Handle(slot, tensor.detach() if owner is None else None, owner)  # R1

    def _check(self, slot: int, tensor: torch.Tensor) -> None:
        if slot >= len(self._rules):
            raise mismatch(slot, f"shape {list(tensor.shape)}", "nothing")
        size = self._layout.slots[slot][0]
        dtype = self._rules[slot].dtype
        if tensor.shape != size or tensor.dtype != dtype:
            raise mismatch(slot, f"{list(tensor.shape)} {tensor.dtype}", f"{list(size)} {dtype}")

    def _owner(self, slot: int, tensor: torch.Tensor) -> Owner | None:
        """Who answers for the slot from now on; None if its tensor is kept as it is."""
        rule = self._rules[slot]
        if rule.treatment is Treatment.REBUILD:
            return self._or_exactly(self._stages[rule.stage], rule.stage)
        if rule.treatment is Treatment.NARROW:
            return self._narrowed(rule.value, tensor)
        if rule.treatment is Treatment.COMPRESS:
            return self._or_exactly(self._compressed(rule.value, tensor), rule.stage)
        if rule.provides:
            self._sources[rule.value] = Kept(tensor, self._layout.values[rule.value])
        return None

    def _narrowed(self, value: int, tensor: torch.Tensor) -> Owner:
        narrowed = self._sources.get(value)
        if narrowed is None:  # R3
            dtype = self._recipe.graph.values[value].narrow
            assert dtype is not None
            whole = tensor.detach().as_strided(*self._layout.values[value])
            narrowed = self._sources[value] = Narrowed(whole, dtype, self._layout.slots)
        assert isinstance(narrowed, Narrowed)
        return narrowed

    def _compressed(self, value: int, tensor: torch.Tensor) -> Owner:
        compressed = self._sources.get(value)
        if compressed is None:  # R3
            whole = tensor.detach().as_strided(*self._layout.values[value])
            compressed = self._sources[value] = Compressed(whole, self._recipe.codecs[value], self._layout.slots)
        assert isinstance(compressed, Compressed)
        return compressed

    def _or_exactly(self, owner: Owner | None, stage: int) -> Owner | None:
        """The owner, with the exact stage as its way out where there is one."""
        if self._ways is None or owner is None:
            return owner
        careful = self._careful.get((owner, stage))
        if careful is None:
            exact = self._exact[stage]
            assert exact is not None
            careful = self._careful[owner, stage] = Careful(owner, exact, self._ways)
        return careful

    def seal(self) -> None:
        """Forward is over: give each stage what its program reads.

        Raises:
            SlotMismatchError: the block has saved fewer tensors than its graph says.
        """
        self._finish()
        self._let_go()

    def _finish(self) -> None:
        if self._next != len(self._rules):
            raise mismatch(self._next, "nothing", "one more saved tensor")
        _connect(self._stages, self._sources)
        _connect(self._exact, self._sources)

    def _let_go(self) -> None:
        """Own nothing any more: torch 2.13 keeps the pack hook, and so this, as long as any saved tensor."""
        self._stages, self._exact, self._ways = [], [], None  # R5
        self._sources = {}
        self._careful = {}


class TrialPacker(Packer):
    """The packer of a block's first forward: keeps everything, and lets go only if everything comes back bit for bit.

    All slots are rebuilt from the arguments alone, whatever the plan keeps: what comes back so does under any plan.
    After `seal`, `wrong` names the values that did not, and `not_finite` those that no codec can hold.
    """

    __slots__ = ("_everything", "_failure", "_handles", "_owners", "not_finite", "wrong")

    def __init__(
        self,
        recipe: Recipe,
        tensors: Sequence[torch.Tensor],
        state: BlockState,
        clock: Clock,
        everything: Recipe,
        alarm: Alarm | None = None,
    ) -> None:
        super().__init__(recipe, tensors, state, clock, alarm)
        self._everything = Packer(everything, tensors, state, Clock())
        self._handles: list[Handle] = []
        self._owners: list[Owner | None] = []
        self._failure: SlotMismatchError | None = None
        self.wrong: frozenset[int] = frozenset()
        self.not_finite: frozenset[int] = frozenset()

    def pack(self, tensor: torch.Tensor) -> Handle:
        """The pack hook. What does not fit the graph is reported by `seal`: until then all is kept."""
        handle = Handle(len(self._handles), tensor.detach(), None)
        self._handles.append(handle)
        if self._failure is None:
            try:
                self._everything.pack(tensor)
                self._owners.append(super().pack(tensor).owner)
                self._check_strides(handle.slot, tensor)
            except SlotMismatchError as error:
                self._failure = error
        return handle

    def _check_strides(self, slot: int, tensor: torch.Tensor) -> None:
        """What a program makes or reads must lie in memory as the graph says; not every kernel keeps to that."""
        rule = self._everything._rules[slot]
        size, stride, _ = self._layout.slots[slot]
        involved = rule.treatment is Treatment.REBUILD or rule.provides
        if involved and not same_strides(size, tensor.stride(), stride):
            raise mismatch(slot, f"laid out by strides {list(tensor.stride())}", f"{list(stride)}")

    def seal(self) -> None:
        """See `Packer.seal`."""
        try:
            self._compare()
        finally:
            self._let_go()

    def _compare(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._finish()
        self._everything._finish()
        self.wrong = frozenset(self._wrong_values())
        self.not_finite = frozenset(self._values_that_are_not_finite())
        if not self.wrong and not self.not_finite & self._recipe.codecs.keys():
            for handle, owner in zip(self._handles, self._owners, strict=True):
                if owner is not None:
                    handle.give_up(owner)

    def _let_go(self) -> None:
        super()._let_go()
        self._everything._let_go()
        self._handles, self._owners = [], []

    def _wrong_values(self) -> Iterator[int]:
        for handle in sorted(self._handles, key=lambda handle: self._rules[handle.slot].stage):
            rule = self._everything._rules[handle.slot]
            if rule.treatment is Treatment.REBUILD:
                stage = self._everything._stages[rule.stage]
                assert stage is not None
                if not same_bits(stage.take(handle.slot), handle.tensor):
                    yield rule.value
        for handle, owner in zip(self._handles, self._owners, strict=True):
            if isinstance(owner, Narrowed):
                if not same_bits(owner.take(handle.slot), handle.tensor):
                    yield self._rules[handle.slot].value
                owner.wide = None

    def _values_that_are_not_finite(self) -> Iterator[int]:
        """An attention mask holds -inf, which makes NaN of its whole group in a codec, and so of all gradients."""
        for handle in self._handles:
            tensor = handle.tensor
            if tensor is not None and tensor.is_floating_point() and not tensor.isfinite().all():
                yield self._rules[handle.slot].value


def _new_stages(recipe: Recipe, layout: Layout, state: BlockState, clock: Clock) -> list[Stage | None]:
    return [
        None if program is None else Stage(program, sizes, layout.slots, recipe.kinds, state, clock)
        for program, sizes in zip(recipe.programs, layout.sizes, strict=True)
    ]


def _connect(stages: Sequence[Stage | None], sources: Mapping[int, Source]) -> None:
    previous: Stage | None = None
    for stage in stages:
        if stage is None:
            continue
        stage.sources = [sources[value] for value in stage.program.sources]
        if previous is not None and stage.program.carried:
            stage.follow(previous)
        previous = stage


def mismatch(slot: int, found: str, expected: str) -> SlotMismatchError:
    """The error for a block that does not save what its graph says."""
    return SlotMismatchError(
        f"the block's saved tensor {slot} is {found}; its graph says {expected}",
        "it behaves differently from call to call: leave it out with apply(..., blocks=[...])",
    )


def same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors agree in layout, dtype and every bit (so that NaN equals NaN)."""
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not same_strides(one.shape, one.stride(), other.stride()):
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.is_floating_point():
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
        one, other = one.view(integer), other.view(integer)
    return torch.equal(one, other)
