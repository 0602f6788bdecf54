"""A profile seen at one token count: every measure interpolated, and the points of the peak timeline by name.

The simulator and the integer program both read this view, and nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hilore_plan.planner.between import Between, between
from hilore_plan.planner.block_view import ClassView, class_view
from hilore_plan.planner.without_gradients import without_gradients
from hilore_plan.schema.plan import Action, compressed
from hilore_plan.schema.profile import Outside, Point, Profile, Risk
from hilore_plan.schema.record import GradientState, Mode


@dataclass(frozen=True)
class View:
    """A profile at one token count. `blocks` are the planned blocks in order, `class_of` the class of each of them.

    `rho` has, for each of `blocks`, the squared relative error of a step's gradient that a `compress` action on a value
    of that block causes in every micro-batch; what was not calibrated is not there.
    """

    tokens: int
    accumulation: bool
    micro_batches: int
    recompute_scale: float
    blocks: tuple[int, ...]
    class_of: tuple[int, ...]
    classes: tuple[ClassView, ...]
    outside: Outside
    store: Mode
    gc: Mode
    rho: tuple[Mapping[tuple[int, Action], float], ...]

    def class_at(self, position: int) -> ClassView:
        """The class of the block at a position in `blocks`."""
        return self.classes[self.class_of[position]]

    @property
    def fixed_bytes(self) -> int:
        """What is there from the first block's forward to the last one's backward, gradients aside."""
        outside = self.outside
        return outside.parameter_bytes + outside.optimizer_bytes + outside.batch_bytes + outside.embedding_bytes

    def gradient_bytes(self, block: int | None) -> int:
        """GradientState that exist when backward reaches `block`; None stands for the head, before any block."""
        if self.accumulation:
            return self.outside.gradient_bytes
        reached = () if block is None else self.outside.block_gradient_bytes[block:]
        return self.outside.head_gradient_bytes + sum(reached)


def forward_point(block: int) -> str:
    """The name of the point at the end of a block's forward."""
    return f"forward:{block}"


def backward_point(block: int, stage: int) -> str:
    """The name of the point of one stage of a block's backward."""
    return f"backward:{block}:{stage}"


def point_names(view: View) -> tuple[str, ...]:
    """All points of the timeline in the order of time."""
    names = [forward_point(block) for block in view.blocks] + ["head"]
    for position in reversed(range(len(view.blocks))):
        stages = range(view.class_at(position).stages)
        names += [backward_point(view.blocks[position], stage) for stage in stages]
    return (*names, "embedding", "optimizer")


def view_at(profile: Profile, tokens: int, gradients: GradientState = "live") -> View:
    """The profile at `tokens` tokens per micro-batch that begins with these gradients.

    Measures are linear between the measured points, bytes rounded up; below the smallest point its own measures hold.

    Raises:
        UsageError: if `tokens` is more than was measured: nothing is known about larger micro-batches. For `none` also
            if the profile knows nothing of micro-batches that begin so.
    """
    if gradients == "none":
        profile = without_gradients(profile)
    at = between(profile, tokens)
    positions = {block: index for index, cls in enumerate(profile.classes) for block in cls.blocks}
    blocks = tuple(sorted(positions))
    classes = tuple(class_view(cls, at, index) for index, cls in enumerate(profile.classes))
    rho = _rho(profile.risk, classes)
    return View(
        tokens=tokens,
        accumulation=profile.workload.accumulation,
        micro_batches=profile.workload.micro_batches,
        recompute_scale=at.number(lambda point: point.recompute_scale),
        blocks=blocks,
        class_of=tuple(positions[block] for block in blocks),
        classes=classes,
        outside=_outside(at),
        store=_mode(at, lambda point: point.store),
        gc=_mode(at, lambda point: point.gc),
        rho=tuple(rho.get(block, {}) for block in blocks),
    )


def _rho(risk: Risk | None, classes: Sequence[ClassView]) -> dict[int, dict[tuple[int, Action], float]]:
    """By block and then by value and action."""
    found: dict[int, dict[tuple[int, Action], float]] = {}
    if risk is None:
        return found
    for cls, units in zip(classes, risk.units, strict=True):
        numbers = {cls.names[unit]: unit for unit in cls.units}
        for unit in units:
            key = numbers[unit.unit], compressed(unit.codec)
            for block, rho in zip(cls.blocks, unit.rho(risk.damping), strict=True):
                found.setdefault(block, {})[key] = rho
    return found


def _outside(at: Between) -> Outside:
    fields = dict.fromkeys(Outside.model_fields)
    fields.pop("block_gradient_bytes")
    counts = {name: at.count(lambda point, name=name: getattr(point.outside, name)) for name in fields}  # type: ignore[misc]
    blocks = at.counts(lambda point: point.outside.block_gradient_bytes)
    return Outside(**counts, block_gradient_bytes=blocks)


def _mode(at: Between, read: Callable[[Point], Mode]) -> Mode:
    return Mode(
        step_seconds=at.number(lambda point: read(point).step_seconds),
        peak_bytes=at.count(lambda point: read(point).peak_bytes),
    )
