"""What a runtime did: entries used, blocks that fell back, seconds spent on rebuilding."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hilore_plan.quantities import format_bytes, format_seconds
from hilore_plan.schema.plan import Entry
from hilore_plan.schema.record import GradientState


@dataclass(frozen=True)
class EntryUse:
    """How often an entry was used (frames of blocks), what it predicted, and what verifying it measured."""

    tokens_up_to: int
    gradients: GradientState
    exposure_up_to: float | None
    frames: int
    predicted_peak_bytes: int
    predicted_recompute_seconds: float
    verified_peak_bytes: int | None

    @classmethod
    def of(cls, entry: Entry, frames: int) -> EntryUse:
        """The use of a plan's entry."""
        return cls(
            entry.tokens_up_to,
            entry.gradients,
            entry.exposure_up_to,
            frames,
            entry.predicted.peak_bytes,
            entry.predicted.recompute_seconds,
            entry.measured.peak_bytes if entry.measured else None,
        )


@dataclass(frozen=True)
class Report:
    """A runtime's account of itself; `as_dict` for scripts, `str` for people.

    `recompute_seconds` is the time the host spent in recovery programs, `peak_bytes` the device's own count of its
    highest use (None on a CPU, which keeps none). `fallbacks` names each block that is checkpointed or stored instead,
    with the reason. `stored_instead` names values that did not come back bit for bit, or that a codec refused, and are
    stored. `escalations` are micro-batches that turned out riskier than their entry and were rebuilt exactly,
    `held_back` those that got a more careful entry because the ones before had used up the error budget.
    `expected_error` is the relative gradient error that compression is expected to have caused.
    """

    entries: list[EntryUse]
    frames: int
    beyond_the_plan: int
    passed_through: int
    recompute_seconds: float
    programs_run: int
    peak_bytes: int | None
    captures: int
    fallbacks: dict[str, str] = field(default_factory=dict)
    stored_instead: dict[str, list[str]] = field(default_factory=dict)
    escalations: int = 0
    held_back: int = 0
    expected_error: float = 0.0
    error_budget: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"hilore: {self.frames} block forwards under the plan, {self.captures} graphs captured"]
        lines += [_entry_line(use) for use in self.entries if use.frames]
        lines.append(f"  rebuilding took {format_seconds(self.recompute_seconds)} in {self.programs_run} programs")
        if self.error_budget is not None:
            lines.append(
                f"  expected gradient error {self.expected_error:.4f}, budget {self.error_budget:.4f}; "
                f"{self.escalations} micro-batches were riskier than predicted and rebuilt exactly"
            )
        if self.held_back:
            lines.append(f"  {self.held_back} micro-batches got a more careful entry, to keep within that budget")
        if self.peak_bytes is not None:
            lines.append(f"  highest device memory {format_bytes(self.peak_bytes)}")
        if self.beyond_the_plan:
            lines.append(f"  {self.beyond_the_plan} block forwards had more tokens than the plan knows: all recomputed")
        lines += [f"  fell back: {name}: {reason}" for name, reason in self.fallbacks.items()]
        lines += [f"  stored instead: {name}: {', '.join(units)}" for name, units in self.stored_instead.items()]
        return "\n".join(lines)


def _entry_line(use: EntryUse) -> str:
    verified = f", verified {format_bytes(use.verified_peak_bytes)}" if use.verified_peak_bytes else ""
    exposure = "" if use.exposure_up_to is None else f", exposure up to {use.exposure_up_to:.3g}"
    begins = ", no gradients yet" if use.gradients == "none" else ""
    return (
        f"  up to {use.tokens_up_to} tokens{begins}{exposure}: {use.frames} block forwards, "
        f"predicted peak {format_bytes(use.predicted_peak_bytes)}{verified}, "
        f"predicted recompute {format_seconds(use.predicted_recompute_seconds)} a step"
    )
