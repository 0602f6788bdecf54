"""`calibrate`: the risk of every unit and codec, by tests of single blocks in fp32.

With g_m the gradient of micro-batch m, the squared error of a unit and codec there is |g_m|^2 times a slope, taken over
all calibrated micro-batches. Exposures predict |g_m| only on average (on SmolLM2-135M |g_m|^2 per squared exposure
varies by a factor of four), and the errors follow the gradient. Those of different micro-batches are independent, so
that over a step they add up in squares, and relative to the gradient of the step that all calibrated micro-batches make
up together

    rho = slope * sum over m of |g_m|^2 / |sum over m of g_m|^2.

A step of more micro-batches whose gradients point the same way has a smaller error than that, never a larger one.

`damping`, a factor on what errors come to below their block, is fitted on mixes of compressed units over a few of those
micro-batches. None of these units is computed from another one of its block: such units err less together than their
tests add up to, and a factor that made up for that would promise too little for all others.

Other micro-batches are kept aside: on them, mixes that nothing was fitted to give the figures by which the prediction
can be judged. These have units that are computed from each other, as plans have; for them the sum is rather too high.
What is predicted is the error of a step, from the calibrated micro-batches alone. Plans add a margin
(`schema.profile.margin`): a step's micro-batches are a sample, as the calibrated ones are.

The bf16 noise floor is measured where the workload is not in fp32, on one micro-batch: a CPU may take a minute for it.
It is scaled to the step as the errors are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hilore_plan.codecs.base import Codec
from hilore_plan.codecs.registry import find
from hilore_plan.errors import UsageError
from hilore_plan.exposure.exposure import relative
from hilore_plan.profiler.adapters import perturbed_adapters
from hilore_plan.profiler.batches import CalibrationBatch, CalibrationData
from hilore_plan.profiler.classes import FoundClass
from hilore_plan.profiler.error import Recorded, gradients, parts_of
from hilore_plan.profiler.fp32 import in_fp32
from hilore_plan.profiler.mixes import Chosen, Joint, JointRuns, draw_mixes, fit_damping, predicted_squares
from hilore_plan.profiler.risk import BlockTests
from hilore_plan.profiler.sketch import Sketch
from hilore_plan.profiler.tape import Tape, taped
from hilore_plan.progress import Progress, Silent
from hilore_plan.quantities import format_seconds
from hilore_plan.schema.profile import Exposures, Mix, Risk

FIT_MIXES = 6
FIT_BATCHES = 3
HELD_OUT_MIXES = 10
# what mixes aim with before it is known: what blocks cause is measured one by one, so that little is left to correct
LIKELY_DAMPING = 1.0


def calibrate(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    classes: Sequence[FoundClass],
    data: CalibrationData,
    codecs: Sequence[str],
    progress: Progress | None = None,
    *,
    mixes: int = HELD_OUT_MIXES,
    seed: int = 0,
) -> Risk:
    """What compressing costs in gradient error, per block, unit and codec.

    The model is in fp32 while this runs and comes back bit for bit, with no gradients; peak memory is that of the model
    and one gradient in fp32, and of what one small micro-batch saves.

    Args:
        model: in train mode, with the `requires_grad` pattern of the training to come.
        blocks: its blocks in order.
        classes: the classes of its profile; blocks without a graph are passed over.
        data: micro-batches of real text; those whose exposure is zero teach nothing, but are counted.
        codecs: names of codecs.
        progress: told what it will cost and how far it is.
        mixes: how many mixes are measured on the micro-batches kept aside.
        seed: of the mixes, and of the noise in adapters that are zero.

    Raises:
        UsageError: fewer than two micro-batches have an exposure.
        CodecError: a codec that does not exist.
    """
    model.zero_grad(set_to_none=True)
    return _Calibration(model, blocks, data, classes, codecs, seed, progress or Silent()).risk(mixes)


def compressing(names: Sequence[str]) -> list[Codec]:
    """The codecs of these names.

    Raises:
        UsageError: one that loses nothing, which has no risk to calibrate, or the same one twice.
        CodecError: one that does not exist.
    """
    if "cast" in names or len(set(names)) < len(names):
        raise UsageError(
            f"{', '.join(names)}: these are not different codecs that compress", "cast is part of every plan anyway"
        )
    return [find(name) for name in names]


def split(batches: Sequence[CalibrationBatch]) -> tuple[list[CalibrationBatch], list[CalibrationBatch]]:
    """Micro-batches to calibrate on, and to keep aside (a quarter of all); none of them of exposure zero.

    Raises:
        UsageError: fewer than two are left.
    """
    live = [batch for batch in batches if batch.exposure > 0]
    if len(live) < 2:
        raise UsageError(
            f"{len(live)} of {len(batches)} micro-batches have an exposure: too few to calibrate on",
            "give more micro-batches, or rollouts whose rewards differ within their groups",
        )
    count = min(max(1, len(batches) // 4), len(live) // 2)
    aside = {len(live) * (2 * number + 1) // (2 * count) for number in range(count)}
    return [b for i, b in enumerate(live) if i not in aside], [b for i, b in enumerate(live) if i in aside]


class _Calibration:
    """One run of `calibrate`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        data: CalibrationData,
        classes: Sequence[FoundClass],
        codecs: Sequence[str],
        seed: int,
        progress: Progress,
    ) -> None:
        self.model = model
        self.parts = parts_of(model, blocks)
        self.data = data
        self.calibrated, self.aside = split(data.batches)
        self.classes = classes
        self.codecs = compressing(codecs)
        self.seed = seed
        self.progress = progress

    def risk(self, mixes: int) -> Risk:
        """Everything, in order."""
        with perturbed_adapters(self.model, self.seed) as adapters:
            with self._recording() as (tapes, narrow):
                self.tests = BlockTests(self.classes, self.codecs, len(self.calibrated), narrow=narrow)
                scale = self._test(tapes, mixes)
                damping = self._damping(tapes, scale)
                held_out = self._held_out(tapes, scale, damping, mixes)
                reference = self._reference(tapes) if narrow else None
            noise = None if reference is None else self._noise(reference, scale)
        self.progress.finish()
        source = self.data.source
        return Risk(
            damping=damping,
            units=self.tests.unit_risks(scale),
            exposures=_exposures(self.data.batches),
            held_out=held_out,
            noise=noise,
            source=f"{source}; {adapters} LoRA matrices B that were zero perturbed" if adapters else source,
            micro_batches=len(self.calibrated),
            zero_is_free=self.data.zero_is_free,
        )

    @contextmanager
    def _recording(self) -> Iterator[tuple[list[Tape], bool]]:
        with in_fp32(self.model) as narrow, taped(self.parts.blocks, distinct_casts=narrow) as tapes:
            yield tapes, narrow

    def _test(self, tapes: list[Tape], mixes: int) -> float:
        """Tests every pair in every block; returns what makes squared errors per squared gradient those of a step."""
        step = Sketch(len(self.parts.everything))
        for number, batch in enumerate(self.calibrated):
            started = time.perf_counter()
            recorded = Recorded(self.model, self.parts, tapes, batch)
            if number == 0:
                self._announce(time.perf_counter() - started, recorded, mixes)
            self.tests.run(recorded, number, step)
            del recorded  # else its graph would be live beside the next one
            self.progress.advance("unit by unit" if number + 1 < len(self.calibrated) else "mixes of units")
        return self.tests.squares / step.squared()

    def _announce(self, seconds: float, recorded: Recorded, mixes: int) -> None:
        """Tells the cost beforehand: of the tests, and of passes through the model of `seconds` each."""
        tested, fitted, aside = len(self.calibrated), len(self._fitted), len(self.aside)
        passes = 2 * tested + fitted * (2 + FIT_MIXES) + aside * (2 + mixes) + self.tests.passes(recorded)
        total = self.tests.expected_seconds(recorded) + passes * seconds
        self.progress.start(f"calibrating, about {format_seconds(total)}", tested + fitted + aside)

    @property
    def _fitted(self) -> list[CalibrationBatch]:
        """The micro-batches to fit on: the highest exposures, for a fit should not hang on what hardly counts."""
        return sorted(self.calibrated, key=lambda batch: -batch.exposure)[:FIT_BATCHES]

    def _joint(self, tapes: list[Tape], batches: Sequence[CalibrationBatch], mixes: list[Chosen]) -> list[Joint]:
        runs = JointRuns(self.model, self.parts, tapes, self.tests.class_of)
        return runs.measure(batches, mixes, lambda: self.progress.advance("mixes of units"))

    def _damping(self, tapes: list[Tape], scale: float) -> float:
        slopes = self.tests.slopes
        mixes = draw_mixes(slopes, self.tests.class_of, scale, LIKELY_DAMPING, FIT_MIXES, self.seed, apart=True)
        return fit_damping(slopes, mixes, self._joint(tapes, self._fitted, mixes))

    def _held_out(self, tapes: list[Tape], scale: float, damping: float, count: int) -> tuple[Mix, ...]:
        slopes = self.tests.slopes
        mixes = draw_mixes(slopes, self.tests.class_of, scale, damping, count, self.seed + 1)
        return tuple(
            Mix(
                units=sum(map(len, mix.values())),
                predicted=math.sqrt(predicted_squares(slopes, mix, damping) * scale),
                measured=joint.relative,
            )
            for mix, joint in zip(mixes, self._joint(tapes, self.aside, mixes), strict=True)
            if mix
        )

    def _reference(self, tapes: list[Tape]) -> Sketch:
        """The gradient of one micro-batch in fp32."""
        sketch = Sketch(len(self.parts.everything))
        sketch.add(Recorded(self.model, self.parts, tapes, self.calibrated[0]).whole())
        return sketch

    def _noise(self, reference: Sketch, scale: float) -> float:
        """What the model's own dtype adds: the same gradient in that dtype, and the step's error if all are like it."""
        batch = self.calibrated[0]
        sketch = Sketch(len(self.parts.everything))
        found = gradients(batch.loss(self.model), self.parts.everything)
        sketch.add([None if gradient is None else gradient.float() for gradient in found])
        return math.sqrt(sketch.squared_distance(reference) / reference.squared() * scale)


def _exposures(batches: Sequence[CalibrationBatch]) -> Exposures:
    mean = sum(batch.exposure for batch in batches) / len(batches)
    return Exposures(norm="l2", mean=mean, values=tuple(relative(batch.exposure, mean) for batch in batches))
