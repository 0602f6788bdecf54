"""`verify_plan`: runs a plan on the hardware, and solves again until the measured peak is inside the budget."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hilore_plan.bench.modes import PLAN
from hilore_plan.bench.process import ModeProcess
from hilore_plan.errors import InfeasibleBudgetError
from hilore_plan.planner.plan import solve_plan
from hilore_plan.progress import Progress, Silent
from hilore_plan.quantities import format_bytes
from hilore_plan.schema.io import save
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Mode

ROUNDS = 5
REPEATS = 3
UNUSED_SHARE = 0.01


def verify_plan(plan: Plan, profile: Profile, *, progress: Progress | None = None) -> Plan:
    """The plan with the measured figures of its largest micro-batch, its peaks inside the budget.

    Each of the entries for that size is measured; what counts is the one that exceeds its prediction most.

    A measured peak above the limit is answered by solving again with what was mispredicted added to every prediction;
    one that leaves more than 1 % of the limit unused loosens the prediction once in the same way. Of the plans measured
    inside the limit the one predicted fastest is returned.

    Args:
        plan: solved from `profile`.
        profile: the profile.
        progress: told about each round.

    Raises:
        InfeasibleBudgetError: no plan was measured inside the limit.
    """
    told = progress or Silent()
    told.start("verifying", ROUNDS)
    with tempfile.TemporaryDirectory(prefix="hilore-verify-") as folder:
        path = Path(folder) / "plan.json"
        save(plan, path)
        with ModeProcess(PLAN, plan.workload, plan.environment.device, plan=path) as process:
            result = _Search(plan, profile, process, path, told).run()
    told.finish()
    return result


class _Search:
    """The rounds of one verification."""

    def __init__(self, plan: Plan, profile: Profile, process: ModeProcess, path: Path, progress: Progress) -> None:
        self.plan = plan
        self.profile = profile
        self.process = process
        self.path = path
        self.progress = progress
        self.extra_bytes = 0
        self.loosened = False
        self.best: Plan | None = None

    def run(self) -> Plan:
        """Measures and solves again until nothing is to be gained."""
        limit = self.plan.budget.limit_bytes
        plan: Plan | None = self.plan
        lowest = None
        for _ in range(ROUNDS):
            if plan is None:
                break
            measured = self._measure(plan)
            highest = max(mode.peak_bytes for mode in measured)
            lowest = min(highest, lowest or highest)
            if highest <= limit:
                self._keep(with_measured(plan, measured))
            self.progress.advance(f"measured {format_bytes(highest)} of {format_bytes(limit)}")
            plan = self._next(plan, measured, limit)
        if self.best is None:
            raise InfeasibleBudgetError(
                f"no plan was measured inside {format_bytes(limit)}; the lowest peak was {format_bytes(lowest or 0)}",
                "give a larger --budget, or profile again: the machine may have changed",
                lowest or 0,
            )
        return self.best

    def _measure(self, plan: Plan) -> list[Mode]:
        """Each entry of the largest micro-batches; the time is that of the workload's own update."""
        if plan is not self.plan:
            save(plan, self.path)
            self.process.replan(self.path, plan.workload)
        self.process.warm()
        peaks = [self._peak_bytes(entry) for entry in largest(plan)]
        seconds = statistics.median(self.process.step_seconds() for _ in range(REPEATS))
        return [Mode(step_seconds=seconds, peak_bytes=peak) for peak in peaks]

    def _peak_bytes(self, entry: Entry) -> int:
        """Its peak in the micro-batch that it is for; without accumulation all of them begin without gradients."""
        begins = entry.gradients if self.plan.workload.accumulation else "none"
        return self.process.entry_peak_bytes(begins, entry.exposure_up_to)

    def _keep(self, plan: Plan) -> None:
        if self.best is None or _predicted_seconds(plan) < _predicted_seconds(self.best):
            self.best = plan

    def _next(self, plan: Plan, measured: list[Mode], limit: int) -> Plan | None:
        """The plan to try next, or None to stop."""
        pairs = list(zip(largest(plan), measured, strict=True))
        difference = max(mode.peak_bytes - entry.predicted.peak_bytes for entry, mode in pairs)
        highest = max(mode.peak_bytes for mode in measured)
        if highest <= limit:
            unused = limit - highest > UNUSED_SHARE * limit
            free = all(entry.predicted.recompute_seconds == 0 for entry, _ in pairs)
            if self.loosened or not unused or difference >= 0 or free:
                return None
            self.loosened = True
        self.extra_bytes += difference
        try:
            return self._solve()
        except InfeasibleBudgetError:
            if self.best is None:
                raise
            return None

    def _solve(self) -> Plan:
        plan = self.plan
        edges = sorted({entry.tokens_up_to for entry in plan.entries})
        return solve_plan(
            self.profile,
            budget=plan.budget.asked,
            risk="0" if plan.risk is None else plan.risk.asked,
            exposure_buckets=sum(entry.gradients == "live" for entry in largest(plan)),
            token_buckets=len(edges),
            solver=plan.solver.name,
            limit_bytes=plan.budget.limit_bytes,
            correction=corrections(edges, self.extra_bytes),
        )


def corrections(edges: list[int], extra_bytes: int) -> Mapping[int, int]:
    """What the largest bucket taught, for all: an excess counts in full, spare bytes in proportion to the tokens."""
    largest = max(edges)
    return {edge: extra_bytes if extra_bytes > 0 else -(-extra_bytes * edge // largest) for edge in edges}


def largest(plan: Plan) -> tuple[Entry, ...]:
    """The entries of the largest micro-batches."""
    most = max(entry.tokens_up_to for entry in plan.entries)
    return tuple(entry for entry in plan.entries if entry.tokens_up_to == most)


def with_measured(plan: Plan, measured: Sequence[Mode]) -> Plan:
    """The plan with the measured figures in the entries of its largest micro-batches."""
    rest = plan.entries[: len(plan.entries) - len(measured)]
    pairs = zip(largest(plan), measured, strict=True)
    found = [entry.model_copy(update={"measured": mode}) for entry, mode in pairs]
    return plan.model_copy(update={"entries": (*rest, *found)})


def _predicted_seconds(plan: Plan) -> float:
    return sum(plan.share(entry) * entry.predicted.step_seconds for entry in largest(plan))
