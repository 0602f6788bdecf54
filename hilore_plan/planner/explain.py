"""Says in words which part of a step makes the peak, and whether any plan could lower it."""

from __future__ import annotations

from hilore_plan.planner.simulate import PointBytes, Simulation
from hilore_plan.quantities import format_bytes
from hilore_plan.schema.plan import Entry

_PARTS = {
    "forward": "forward through block {block}, with what the blocks up to it keep",
    "head": "the head (logits and loss), on top of what all blocks keep",
    "backward": "backward through block {block}, with what it rebuilds and what earlier blocks keep",
    "embedding": "the embedding's gradient",
    "optimizer": "the optimizer's update",
}
_HELPLESS = {
    "head": "a fused or chunked head, or a smaller micro-batch, would lower it",
    "embedding": "fewer trainable parameters would lower it",
    "optimizer": "an optimizer with less state, or fewer trainable parameters, would lower it",
}


def activations_bind(binding: str) -> bool:
    """Whether the blocks' activations have a part in the peak at a point of the timeline."""
    return binding not in ("embedding", "optimizer")


def explain_binding(entry: Entry) -> str:
    """One sentence on what makes the peak of a plan's entry, for a table or a note under it."""
    part = describe_point(entry.predicted.binding)
    if not activations_bind(entry.predicted.binding):
        remedy = _HELPLESS[entry.predicted.binding]
        return f"The peak is made by {part}, not by activations: no plan can lower it; {remedy}."
    if entry.predicted.binding == "head" and entry.predicted.recompute_seconds == 0:
        return f"The peak is made by {part}; everything is stored already."
    return f"The peak is made by {part}."


def explain_least(simulation: Simulation) -> str:
    """Why the least peak cannot be lowered: what is there at its highest point."""
    point = next(point for point in simulation.points if point.name == simulation.binding)
    sentence = f"even so the peak is made by {describe_point(point.name)}: {_split(point)}"
    part = point.name.split(":")[0]
    helpless = part in _HELPLESS and point.kept + point.rebuilt < point.working
    return f"{sentence}; {_HELPLESS[part]}" if helpless else sentence


def describe_point(name: str) -> str:
    """A point of the timeline in words: `backward:3:1` is backward through block 3."""
    part, *numbers = name.split(":")
    return _PARTS[part].format(block=numbers[0] if numbers else "")


def _split(point: PointBytes) -> str:
    parts = {
        "parameters, optimizer and batch": point.fixed,
        "gradients": point.gradients,
        "activations": point.kept + point.rebuilt,
        "working memory": point.working,
    }
    return ", ".join(f"{format_bytes(count)} {name}" for name, count in parts.items() if count)
