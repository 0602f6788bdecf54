"""What a marked recording says: the bytes outside the blocks, and what forward and backward need while they run.

Each working figure is what the recording holds beyond what the planner's timeline adds up for store-everything at the
same point, so that timeline and recording agree there to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hilore_plan.profiler.classes import FoundClass
from hilore_plan.profiler.memory import Trace
from hilore_plan.profiler.requests import StageRequests, read_requests
from hilore_plan.profiler.step import ActorStep
from hilore_plan.schema.profile import BlockClass, Outside, Transient, WithoutGradients
from hilore_plan.schema.record import GradientState


@dataclass(frozen=True)
class Gradients:
    """Bytes of the gradients: all of them, those of the head, and those of each block."""

    total: int
    head: int
    blocks: tuple[int, ...]

    def reached(self, block: int) -> int:
        """Gradients that are there once backward has begun on `block`."""
        return self.head + sum(self.blocks[block:])


def gradients_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Gradients:
    """Sizes of the gradients; the head is all that lies outside the blocks and is no embedding of its own."""
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head = {id(parameter) for parameter in output.parameters()} if isinstance(output, nn.Module) else set()
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]
    return Gradients(
        total=_trainable_bytes(list(model.parameters())),
        head=_trainable_bytes([p for p in outside if id(p) in head or id(p) not in embeddings]),
        blocks=tuple(_trainable_bytes(list(block.parameters())) for block in blocks),
    )


def _trainable_bytes(parameters: Sequence[nn.Parameter]) -> int:
    unique = {id(p): p for p in parameters if p.requires_grad}
    return sum(p.numel() * p.element_size() for p in unique.values())


def stored_bytes(record: BlockClass, value_bytes: Sequence[int], stage: int = 0) -> int:
    """Bytes that store-everything holds of one block from `stage` of its backward on."""
    return sum(
        count
        for value, count in zip(record.values, value_bytes, strict=True)
        if value.kind != "parameter" and not value.shared and max(value.slot_stages, default=-1) >= stage
    )


def stage_bytes(record: BlockClass, value_bytes: Sequence[int], stage: int) -> int:
    """Bytes that one stage of a block's backward asks for, whether they were kept or are rebuilt."""
    return sum(
        count
        for value, count in zip(record.values, value_bytes, strict=True)
        if value.kind != "parameter" and not value.shared and stage in value.slot_stages
    )


@dataclass(frozen=True)
class Reading:
    """A marked recording of store-everything, beside what the timeline knows.

    Args:
        trace: the recording.
        classes: the classes, with the bytes of their values in `value_bytes`.
        input_bytes: what the first block is given that is not shared.
        begins: whether all gradients were there when the recording began, or none.
    """

    trace: Trace
    classes: Sequence[FoundClass]
    value_bytes: Sequence[Sequence[int]]
    input_bytes: int
    gradients: Gradients
    begins: GradientState

    @property
    def class_of(self) -> list[int]:
        """The class of each block."""
        found = {block: number for number, c in enumerate(self.classes) for block in c.record.blocks}
        return [found[block] for block in sorted(found)]

    @property
    def embedding_bytes(self) -> int:
        """What is live when the first block begins, its own input aside."""
        live = max(segment.live_bytes for segment in self.trace.named("forward:0"))
        return max(0, live - self.input_bytes)

    def stored_before(self, block: int) -> int:
        """What the blocks before `block` keep."""
        kept = [stored_bytes(c.record, count) for c, count in zip(self.classes, self.value_bytes, strict=True)]
        return sum(kept[number] for number in self.class_of[:block])

    def head_working_bytes(self) -> int:
        """Beyond everything stored: the last block's output, the loss and its temporaries."""
        last = len(self.class_of) - 1
        known = self.embedding_bytes + self.stored_before(last + 1) + self._gradients(self.gradients.head)
        return self._beyond(f"end:{last}", known)

    def stage_working_bytes(self, number: int) -> tuple[int, ...]:
        """For each stage of class `number` the most that any block of it needs beyond what is stored."""
        stages = range(self.classes[number].record.stages)
        return tuple(max(self._stage(block, number, stage) for block in self._members(number)) for stage in stages)

    def requests(self, number: int) -> tuple[StageRequests, ...]:
        """By stage of class number `number`: what is held beyond its values, and when each is first asked for.

        In the order of asking in the class's first block, and the most that any block holds.
        """
        found = self.classes[number]
        stages = [StageRequests() for _ in range(found.record.stages)]
        for block in self._members(number):
            read_requests(
                self.trace.named(f"backward:{block}"),
                lambda slot: (found.slot_stages[slot], found.slot_values[slot]),
                lambda stage, block=block: self._known(block, number, stage),  # type: ignore[misc]
                stages,
            )
        return tuple(stages)

    def forward_working_bytes(self, number: int, unkept: int) -> int:
        """The most that forward of class `number` needs beyond what store-everything keeps of the block.

        `unkept` is the peak of a forward that keeps nothing. Where something is kept it would count twice, and where
        nothing is kept a stage of backward holds more: only if none does, `unkept` itself is the figure.
        """
        stages = self.stage_working_bytes(number)
        record, counts = self.classes[number].record, self.value_bytes[number]
        if unkept > max(stage_bytes(record, counts, stage) + working for stage, working in enumerate(stages)):
            return unkept
        return max(self._forward(block, number) for block in self._members(number))

    def embedding_working_bytes(self) -> int:
        """What the end of backward needs, after the first block's."""
        return self._beyond("embedding", self.embedding_bytes + self._gradients(self.gradients.total))

    def optimizer_working_bytes(self) -> int:
        """What clipping and the optimizer need."""
        return self._beyond("optimizer", self._gradients(self.gradients.total))

    def _members(self, number: int) -> tuple[int, ...]:
        return self.classes[number].record.blocks

    def _stage(self, block: int, number: int, stage: int) -> int:
        return self._beyond(f"backward:{block}:{stage}", self._known(block, number, stage))

    def _known(self, block: int, number: int, stage: int) -> int:
        """What the timeline adds up for store-everything in a stage of a block."""
        alive = stored_bytes(self.classes[number].record, self.value_bytes[number], stage)
        gradients = self._gradients(self.gradients.reached(block))
        return self.embedding_bytes + self.stored_before(block) + alive + gradients

    def _forward(self, block: int, number: int) -> int:
        kept = stored_bytes(self.classes[number].record, self.value_bytes[number])
        return self._beyond(f"forward:{block}", self.embedding_bytes + self.stored_before(block) + kept)

    def _gradients(self, count: int) -> int:
        return 0 if self.begins == "live" else count

    def _beyond(self, name: str, known: int) -> int:
        return max(0, *(peak - known for peak in self._peaks(name)))

    def _peaks(self, name: str) -> Iterator[int]:
        yield 0
        yield from (segment.peak_bytes for segment in self.trace.named(name))


def outside_of(reading: Reading, step: ActorStep, extra_bytes: int) -> Outside:
    """The record of what lives outside the blocks; `extra_bytes` are the device's own, always there."""
    return Outside(
        parameter_bytes=step.parameter_bytes() + extra_bytes,
        optimizer_bytes=step.optimizer_bytes(),
        batch_bytes=step.batch_bytes(),
        gradient_bytes=reading.gradients.total,
        head_gradient_bytes=reading.gradients.head,
        block_gradient_bytes=reading.gradients.blocks,
        embedding_bytes=reading.embedding_bytes,
        head_working_bytes=reading.head_working_bytes(),
        embedding_working_bytes=reading.embedding_working_bytes(),
        optimizer_working_bytes=reading.optimizer_working_bytes(),
    )


def without_gradients(reading: Reading, classes: Sequence[Transient]) -> WithoutGradients:
    """The record of a micro-batch that begins without gradients: its recording, and what that says of each class."""
    return WithoutGradients(
        classes=tuple(classes),
        head_working_bytes=reading.head_working_bytes(),
        embedding_working_bytes=reading.embedding_working_bytes(),
        optimizer_working_bytes=reading.optimizer_working_bytes(),
    )
