"""`run_bench`: a plan and the modes it is compared with, each in its own process, their steps taken in turn."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from hilore_plan.bench.modes import AGAINST, PLAN, PLANNED, check_modes
from hilore_plan.bench.prediction import predicted_step
from hilore_plan.bench.process import ModeProcess
from hilore_plan.errors import RecoveryError, UsageError
from hilore_plan.planner.baselines import baseline
from hilore_plan.profiler.environment import describe_environment
from hilore_plan.progress import Progress, Silent
from hilore_plan.schema.bench import Bench, ModeResult, Spread
from hilore_plan.schema.io import save
from hilore_plan.schema.plan import Plan, codec_of
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Mode


@dataclass
class _Measured:
    """What is known of one mode so far."""

    name: str
    process: ModeProcess
    gradient_error: float = 0.0
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def run_bench(
    plan: Plan,
    *,
    against: Sequence[str] = AGAINST,
    pairs: int = 7,
    profile: Profile | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Measures the plan's largest micro-batches beside other modes, and `gc` always: figures are relative to it.

    Gradients are compared first, then peaks are taken, then `pairs` rounds of one step of each mode. A mode's
    throughput is compared with that of `gc` round by round, and the median of the rounds counts: a machine that slows
    down for some rounds slows both down.

    Args:
        plan: its workload says what is run; every process builds the model anew from the workload's source.
        against: names of modes.
        pairs: rounds of timing.
        profile: what the plan was made from, for the modes that are other plans.
        progress: told about each measurement.

    Raises:
        UsageError: an unknown mode or no pairs.
        RecoveryError: the plan's gradient differs from that of store-everything: no speed is worth showing then.
    """
    check_modes(against)
    if pairs < 1:
        raise UsageError(f"{pairs} pairs are too few", "give --pairs 1 or more; 7 for a figure to rely on")
    plans = {PLAN: plan, **{name: baseline(name, plan, profile) for name in PLANNED if name in against}}
    names = [*plans, *(name for name in AGAINST if name in {*against, "gc"})]
    told = progress or Silent()
    told.start("measuring", 2 * len(names) + 1 + pairs * len(names))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hilore-bench-")))
        modes = _start(plan, names, plans, folder, stack, told)
        _measure_peaks(modes, told)
        _time(modes, pairs, told)
    told.finish()
    return _document(plan, plans, modes, pairs)


def _start(
    plan: Plan, names: Sequence[str], plans: Mapping[str, Plan], folder: Path, stack: ExitStack, progress: Progress
) -> list[_Measured]:
    """Starts every mode and checks its gradient; the reference's process is kept if its mode was asked for."""
    device = plan.environment.device
    paths = {name: folder / f"{name}.json" for name in plans}
    for name, path in paths.items():
        save(plans[name], path)
    reference = folder / "gradient.pt"
    store = ModeProcess("store", plan.workload, device)
    with ExitStack() as unwanted:
        (stack if "store" in names else unwanted).push(store)
        store.save_gradient(reference)
    progress.advance(f"gradients: {names[0]}")
    modes = []
    for name in names:
        if name == "store":
            modes.append(_Measured(name, store))
        else:
            process = stack.enter_context(ModeProcess(name, plan.workload, device, plan=paths.get(name)))
            modes.append(_Measured(name, process, process.gradient_error(reference)))
        if name in plans and is_exact(plans[name]):
            refuse_wrong(name, modes[-1].gradient_error)
        progress.advance("gradients")
    reference.unlink()
    return modes


def refuse_wrong(name: str, gradient_error: float) -> None:
    """Raises if the gradient of an exact plan is not, bit for bit, that of store-everything."""
    if gradient_error != 0.0:
        raise RecoveryError(
            f"{name} changes the gradient: relative error {gradient_error:.3g} where 0.0 is due; no speed is shown",
            "this is a fault in hilore, not in your model: please report it with the plan file",
        )


def is_exact(plan: Plan) -> bool:
    """Whether a plan compresses nothing."""
    groups = (group for entry in plan.entries for group in entry.groups)
    return all(codec_of(action) is None for group in groups for action in group.actions.values())


def _measure_peaks(modes: Sequence[_Measured], progress: Progress) -> None:
    """One step first, for the optimizer's state to be there; the recorded step warms the mode up."""
    for measured in modes:
        measured.process.warm()
        measured.peak_bytes = measured.process.peak_bytes()
        progress.advance("peaks")


def _time(modes: Sequence[_Measured], pairs: int, progress: Progress) -> None:
    for number in range(pairs):
        for measured in modes:
            measured.seconds.append(measured.process.step_seconds())
            progress.advance(f"round {number + 1} of {pairs}")


def _document(plan: Plan, plans: Mapping[str, Plan], modes: Sequence[_Measured], pairs: int) -> Bench:
    gc = next(measured for measured in modes if measured.name == "gc")
    return Bench(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        pairs=pairs,
        workload=plan.workload,
        environment=describe_environment(torch.device(plan.environment.device)),
        modes=tuple(_result(measured, gc, plan, plans.get(measured.name)) for measured in modes),
    )


def _result(measured: _Measured, gc: _Measured, plan: Plan, own: Plan | None) -> ModeResult:
    median = statistics.median(measured.seconds)
    tokens = plan.workload.tokens * plan.workload.micro_batches
    return ModeResult(
        name=measured.name,
        step_seconds=Spread(median=median, min=min(measured.seconds), max=max(measured.seconds)),
        tokens_per_second=tokens / median,
        peak_bytes=measured.peak_bytes,
        throughput_vs_gc=paired_ratio(gc.seconds, measured.seconds),
        peak_vs_gc=measured.peak_bytes / gc.peak_bytes,
        gradient_error=measured.gradient_error,
        predicted=_predicted(measured, plan) if own is None else predicted_step(own, measured.process.exposures),
    )


def paired_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of one's seconds divided by the other's."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def _predicted(measured: _Measured, plan: Plan) -> Mode | None:
    entry = plan.entries[-1]
    return {"store": entry.store, "gc": entry.gc}.get(measured.name)
