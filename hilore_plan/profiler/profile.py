"""`profile_module`: measures a model's actor update at several sizes, and writes down what every choice would cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch
from torch import nn

from hilore_plan.codecs.base import Codec
from hilore_plan.errors import UsageError
from hilore_plan.graph.blocks import find_blocks
from hilore_plan.graph.signature import Call
from hilore_plan.profiler.batches import CalibrationData, CalibrationText, random_text, step_data, text_data
from hilore_plan.profiler.calibration import calibrate, compressing
from hilore_plan.profiler.calls import record_calls
from hilore_plan.profiler.checkpointing import checkpointed
from hilore_plan.profiler.class_measure import class_measure, transient
from hilore_plan.profiler.classes import FoundClass, find_classes
from hilore_plan.profiler.clock import seconds_of
from hilore_plan.profiler.environment import describe_environment, describe_model, resolve_device
from hilore_plan.profiler.formats import CodecMeasures, measure_codecs
from hilore_plan.profiler.forward import ForwardMeasure, measure_forward
from hilore_plan.profiler.memory import Recorder, Trace
from hilore_plan.profiler.opaque import OpaqueClass, warn_of_opaque
from hilore_plan.profiler.ops import OpMeasures, storage_bytes_of
from hilore_plan.profiler.outside import Reading, gradients_of, outside_of, without_gradients
from hilore_plan.profiler.peaks import measure_peak, quiet_profiler, start_bytes
from hilore_plan.profiler.recompute_scale import bounded
from hilore_plan.profiler.scaled_workloads import scaled_workloads
from hilore_plan.profiler.step import ActorStep, Loss
from hilore_plan.profiler.watch import BlockWatch
from hilore_plan.progress import Progress, Silent
from hilore_plan.schema.profile import Point, Profile, Transient
from hilore_plan.schema.record import GradientState, Mode, Workload

# rounds of step times at a point: five, or as few as three at the largest point and one below it once they take long
ROUNDS = 5
LEAST_ROUNDS = 3
ENOUGH_SECONDS = 12.0


def profile_module(
    model: nn.Module,
    workload: Workload,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    token_points: int = 4,
    blocks: Sequence[str | nn.Module] | None = None,
    loss: Loss | None = None,
    codecs: Sequence[str] = (),
    calibration: CalibrationText | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Measures `model` under `workload` and at `token_points` fractions of its length.

    Blocks that cannot be captured are measured as a whole, with a warning that names them (`UncapturedWarning`).

    Args:
        model: in train mode on `device`, with the `requires_grad` pattern of the training to come.
        workload: the actor update; its sizes are the largest point.
        vocab_size: token ids of the synthetic data lie below it.
        device: where the model is.
        token_points: how many sizes are measured; the lengths are `1/n, 2/n, ..., 1` of the workload's.
        blocks: the blocks, by name or as modules, where they cannot be found.
        loss: replaces the GRPO loss for modules that are no Hugging Face causal LMs.
        codecs: codecs whose bytes, seconds and risk are measured; without any, plans can only be exact.
        calibration: the text to calibrate on; random tokens without it. A `loss` sees synthetic micro-batches instead.
        seed: of the synthetic data.
        progress: told about each measurement.

    Raises:
        UsageError: no blocks are found, or nothing in the model is trainable.
        DeviceError: `device` is not there.
        CodecError: a codec that does not exist.
    """
    if token_points < 1:
        raise UsageError(f"{token_points} token points are too few", "give 1 or more")
    where = torch.device(device) if isinstance(device, torch.device) else resolve_device(device)
    formats = compressing(codecs)
    session = _Session(model, workload, vocab_size, where, blocks, loss, formats, seed, progress or Silent())
    if formats and loss is not None:
        session.calibration = step_data(workload, loss, vocab_size, where, seed)
    elif formats:
        session.calibration = text_data(calibration or random_text(vocab_size=vocab_size, seed=seed), where)
    return session.run(token_points)


@dataclass(frozen=True)
class _Timed:
    """Seconds of a step that stores everything, of one that checkpoints, and of what checkpointing adds (medians)."""

    store: float
    gc: float
    added: float


class _Session:
    """One run of `profile_module`."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        vocab_size: int,
        device: torch.device,
        blocks: Sequence[str | nn.Module] | None,
        loss: Loss | None,
        codecs: Sequence[Codec],
        seed: int,
        progress: Progress,
    ) -> None:
        self.model = model
        self.codecs = codecs
        self.calibration: CalibrationData | None = None
        self.workload = workload
        self.device = device
        self.progress = progress
        named = find_blocks(model, blocks)
        self.names = tuple(name for name, _ in named)
        self.blocks = [block for _, block in named]
        self._options = {"vocab_size": vocab_size, "device": device, "seed": seed, "loss": loss}
        self.first = self._step(workload, None)
        self.gradients = gradients_of(model, self.blocks)

    def run(self, token_points: int) -> Profile:
        """Everything, in order."""
        quiet_profiler()
        workloads = scaled_workloads(self.workload, token_points)
        classes = find_classes(self.blocks, self._calls(self.first))
        warn_of_opaque([c for c in classes if isinstance(c, OpaqueClass)], self.names)
        # before the first step: neither optimizer state nor gradients are there, and weights are as they were given
        names = tuple(codec.name for codec in self.codecs)
        data = self.calibration
        risk = calibrate(self.model, self.blocks, classes, data, names, self.progress) if data else None
        self.progress.start("profiling", 2 + len(workloads) * (3 + ROUNDS))
        self.progress.advance("first step")
        self._step(workloads[0], self.first.optimizer).step()
        self.progress.advance(f"{workloads[0].tokens} tokens: peak of store-everything")
        points = tuple(self._point(scaled, classes) for scaled in workloads)
        self.progress.finish()
        return Profile(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            model=describe_model(self.model),
            workload=self.workload,
            environment=describe_environment(self.device),
            block_names=self.names,
            classes=tuple(c.record for c in classes),
            points=points,
            codecs=names,
            risk=risk,
        )

    def _step(self, workload: Workload, optimizer: torch.optim.Optimizer | None) -> ActorStep:
        return ActorStep(self.model, workload, optimizer=optimizer, **self._options)  # type: ignore[arg-type]

    def _calls(self, step: ActorStep) -> list[Call]:
        return record_calls(self.blocks, lambda: step.loss(step.model, step.batches[0]))

    def _point(self, workload: Workload, classes: Sequence[FoundClass]) -> Point:
        step = self._step(workload, self.first.optimizer)
        about = f"{workload.tokens} tokens"
        extra = self._extra_bytes(step)
        base = start_bytes(step, step.workload.last_begins)
        trace = self._record(step, classes)
        first = self._record_first(step, classes)
        self.progress.advance(f"{about}: peak of checkpointing")
        with checkpointed(self.blocks):
            gc_peak = measure_peak(step, last=step.workload.last_begins)
        self.progress.advance(f"{about}: step times")
        timed = self._time(step, about)
        calls = self._calls(step)
        measures = [c.measure(self.blocks[c.first], calls[c.first]) for c in classes]
        formats = [self._formats(c, calls[c.first]) for c in classes]
        runs = [self._forward(c, calls[c.first]) for c in classes]
        reading = self._reading(trace, step.workload.last_begins, classes, measures, calls)
        found = self._transients(reading, calls, runs)
        other = None if first is None else self._reading(first, "none", classes, measures, calls)
        self.progress.advance("next size")
        return Point(
            tokens=workload.tokens,
            batch=workload.batch,
            length=workload.prompt_tokens + workload.response_tokens,
            classes=tuple(map(class_measure, measures, formats, found, runs)),
            outside=outside_of(reading, step, extra),
            store=Mode(step_seconds=timed.store, peak_bytes=base + trace.peak_bytes),
            gc=Mode(step_seconds=timed.gc, peak_bytes=gc_peak),
            recompute_scale=self._scale(timed, classes, measures),
            without_gradients=None if other is None else without_gradients(other, self._transients(other, calls, runs)),
        )

    def _extra_bytes(self, step: ActorStep) -> int:
        """What the device holds besides the model and its update: workspaces of libraries, on CUDA."""
        if self.device.type != "cuda":
            return 0
        return max(0, start_bytes(step, "none") - step.live_bytes())

    def _record(self, step: ActorStep, classes: Sequence[FoundClass]) -> Trace:
        """A recorded micro-batch under store-everything, begun as it is, and the optimizer's step after it."""
        stages = {block: c.slot_stages for c in classes for block in c.record.blocks}
        with Recorder(self.device) as recorder:
            with BlockWatch(self.blocks, [stages[index] for index in sorted(stages)], recorder):
                step.backward(0)
            recorder.mark("optimizer")
            step.update()
        return recorder.trace

    def _record_first(self, step: ActorStep, classes: Sequence[FoundClass]) -> Trace | None:
        """The same without gradients to begin with; None where the last micro-batch begins so itself."""
        if step.workload.last_begins == "none":
            return None
        start_bytes(step, "none")
        return self._record(step, classes)

    def _time(self, step: ActorStep, about: str) -> _Timed:
        """Medians over interleaved rounds of one micro-batch and one update; those recorded before were the warm-up."""
        store: list[float] = []
        gc: list[float] = []
        update: list[float] = []
        step.begin(step.workload.last_begins)
        least = LEAST_ROUNDS if step.workload.tokens == self.workload.tokens else 1
        for number in range(ROUNDS):
            if number < least or sum(store) + sum(gc) < ENOUGH_SECONDS:
                store.append(seconds_of(step.backward, self.device))
                with checkpointed(self.blocks):
                    gc.append(seconds_of(step.backward, self.device))
                update.append(seconds_of(step.update, self.device))
            self.progress.advance(f"{about}: {'step times' if number + 1 < ROUNDS else 'op times'}")
        count, rest = len(step.batches), step.updates * statistics.median(update)
        return _Timed(
            store=count * statistics.median(store) + rest,
            gc=count * statistics.median(gc) + rest,
            added=count * statistics.median(slow - fast for slow, fast in zip(gc, store, strict=True)),
        )

    def _forward(self, found: FoundClass, call: Call) -> ForwardMeasure:
        """The forward of a block that keeps nothing."""
        return measure_forward(self.blocks[found.first], call, found.slot_values, self.device)

    def _transients(self, reading: Reading, calls: Sequence[Call], runs: Sequence[ForwardMeasure]) -> list[Transient]:
        """By class, what depends on the gradients that the recording began with."""
        return [
            transient(self._working(reading, number, calls[found.first], runs[number]), reading.requests(number))
            for number, found in enumerate(reading.classes)
        ]

    def _working(self, reading: Reading, number: int, call: Call, run: ForwardMeasure) -> tuple[tuple[int, ...], int]:
        """What each stage of backward, and forward, need of a class beyond the values that they have."""
        found, stages = reading.classes[number], reading.stage_working_bytes(number)
        unkept = max(run.peak_bytes)
        if isinstance(found, OpaqueClass) and found.checkpointed:
            # store-everything never runs such a forward again, nor one that keeps nothing
            return (max(*stages, found.rerun_working_bytes(self.blocks[found.first], call)),), unkept
        return stages, reading.forward_working_bytes(number, unkept)

    def _formats(self, found: FoundClass, call: Call) -> CodecMeasures:
        """What the codecs make of a class; of one without a graph, nothing."""
        if isinstance(found, OpaqueClass) or not self.codecs:
            return CodecMeasures()
        return measure_codecs(found.graph, found.record, self.blocks[found.first], call, self.codecs)

    def _reading(
        self,
        trace: Trace,
        begins: GradientState,
        classes: Sequence[FoundClass],
        measures: Sequence[OpMeasures],
        calls: Sequence[Call],
    ) -> Reading:
        places = next(c.own_inputs for c in classes if 0 in c.record.blocks)
        return Reading(
            trace=trace,
            classes=classes,
            value_bytes=[m.value_bytes for m in measures],
            input_bytes=sum(storage_bytes_of(calls[0].tensors[place]) for place in places),
            gradients=self.gradients,
            begins=begins,
        )

    def _scale(self, timed: _Timed, classes: Sequence[FoundClass], measures: Sequence[OpMeasures]) -> float:
        """What a second of recomputation costs within a step, from what checkpointing adds to it."""
        alone = sum(
            len(c.record.blocks) * c.rerun_seconds(measured) for c, measured in zip(classes, measures, strict=True)
        )
        if alone <= 0:
            return 1.0
        return bounded(timed.added / (self.workload.micro_batches * alone))
