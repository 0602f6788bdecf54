"""Profiles with made-up calibrations: codecs with plausible bytes, seconds and errors, and exposures of rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st
from strategies import small_profiles

from hilore_plan.schema.profile import BlockClass, ClassMeasure, Exposures, Op, Point, Profile, Risk, UnitRisk, margin

# bytes per element, seconds per element (encode and decode), and the squared error over that of int8
CODECS = {
    "int8": (1 + 1 / 64, 2.7e-10, 1.0),
    "fp8_e4m3": (1 + 1 / 64, 3.0e-10, 12.0),
    "fp8_e4m3_raw": (1.0, 2.0e-10, 15.0),
    "int4": (0.5 + 1 / 32, 3.5e-10, 200.0),
}
# relative errors of a step with a unit in int8 in all blocks, by what its name ends in
ERRORS = {"gate_proj": 0.007, "up_proj": 0.007, "add": 0.02, "add.2": 0.03, "rotary": 0.025, "v_proj": 0.006}
DAMPING = 0.2
SPREAD = 0.1
# a third of all micro-batches has no advantage, a few have a large one
EXPOSURES = (0.0,) * 8 + tuple(0.2 + 0.1 * k for k in range(12)) + (2.5, 3.0, 4.0, 5.0)


def calibrated(
    profile: Profile,
    *,
    codecs: Sequence[str] = ("int8", "fp8_e4m3", "int4"),
    exposures: Sequence[float] = EXPOSURES,
    zero_is_free: bool = True,
) -> Profile:
    """The profile as if it had been made with `--codecs`."""
    mean = sum(exposures) / len(exposures)
    shares = tuple(value / mean for value in exposures)
    return profile.model_copy(
        update={
            "classes": tuple(cls.model_copy(update={"ops": tuple(map(_guarded, cls.ops))}) for cls in profile.classes),
            "points": tuple(_with_codecs(profile, point, codecs) for point in profile.points),
            "codecs": tuple(codecs),
            "risk": Risk(
                damping=DAMPING,
                units=tuple(_risks(cls, len(profile.block_names), codecs) for cls in profile.classes),
                exposures=Exposures(norm="l2", mean=mean, values=shares),
                noise=0.054,
                source="made up",
                micro_batches=len(exposures),
                zero_is_free=zero_is_free,
            ),
        }
    )


def _guarded(op: Op) -> Op:
    """Attention keeps a log-sum-exp of exact q and k."""
    return op.model_copy(update={"exact_inputs": op.inputs[:2]}) if op.name.endswith("sdpa") else op


def _with_codecs(profile: Profile, point: Point, codecs: Sequence[str]) -> Point:
    classes = zip(profile.classes, point.classes, strict=True)
    return point.model_copy(update={"classes": tuple(_coded(cls, measure, codecs) for cls, measure in classes)})


def _elements(cls: BlockClass, measure: ClassMeasure) -> list[int]:
    """Elements of each value that codecs take: what ops make in floating point, unless it is tiny."""
    widths = {"float32": 4, "bfloat16": 2}
    largest = max(measure.value_bytes)
    return [
        size // widths[value.dtype] if value.kind == "op" and 64 * size >= largest else 0
        for value, size in zip(cls.values, measure.value_bytes, strict=True)
    ]


def _coded(cls: BlockClass, measure: ClassMeasure, codecs: Sequence[str]) -> ClassMeasure:
    elements = _elements(cls, measure)
    return measure.model_copy(
        update={
            "codec_bytes": {codec: tuple(math.ceil(CODECS[codec][0] * n) for n in elements) for codec in codecs},
            "codec_seconds": {codec: tuple(CODECS[codec][1] * n for n in elements) for codec in codecs},
        }
    )


def _risks(cls: BlockClass, blocks: int, codecs: Sequence[str]) -> tuple[UnitRisk, ...]:
    units = [value.name for value in cls.values if value.keepable and value.kind == "op"]
    return tuple(_unit_risk(cls, number, unit, codec, blocks) for number, unit in enumerate(units) for codec in codecs)


def _unit_risk(cls: BlockClass, number: int, unit: str, codec: str, blocks: int) -> UnitRisk:
    whole = next((error for name, error in ERRORS.items() if unit.endswith(name)), 0.01)
    local = whole**2 / blocks * CODECS[codec][2] / 2 / margin(SPREAD)
    # blocks differ by a factor of up to three, and each unit in its own way
    factors = [math.exp(0.5 * math.sin(1.7 * number + 0.4 * block)) for block in cls.blocks]
    return UnitRisk(
        unit=unit,
        codec=codec,
        local=tuple(local * factor for factor in factors),
        propagated=tuple(local * factor / DAMPING for factor in factors),
        spread=(SPREAD,) * len(factors),
    )


@st.composite
def calibrated_profiles(draw: st.DrawFn) -> Profile:
    """Small random profiles with two codecs, ops that want some inputs exact, and two kinds of micro-batch."""
    profile = draw(small_profiles(max_blocks=2, max_ops=3))
    codecs = ("int8", "int4")
    classes = tuple(
        cls.model_copy(update={"ops": tuple(draw(_with_exact_inputs(op)) for op in cls.ops)}) for cls in profile.classes
    )
    point = profile.points[0]
    measures = tuple(draw(_small_codecs(measure, codecs)) for measure in point.classes)
    rho = st.integers(0, 9)
    units = tuple(
        tuple(
            UnitRisk(
                unit=value.name,
                codec=codec,
                local=tuple(float(draw(rho)) for _ in cls.blocks),
                propagated=tuple(float(draw(rho)) for _ in cls.blocks),
            )
            for value in cls.values
            if value.keepable and value.kind == "op"
            for codec in codecs
        )
        for cls in profile.classes
    )
    exposures = Exposures(norm="l2", mean=1.0, values=(draw(st.sampled_from([0.0, 0.5])), 0.5, 1.0, 2.0))
    risk = Risk(damping=0.5, units=units, exposures=exposures, source="made up", micro_batches=4)
    update = {"points": (point.model_copy(update={"classes": measures}),), "codecs": codecs, "risk": risk}
    return profile.model_copy(update={"classes": classes, **update})


@st.composite
def _with_exact_inputs(draw: st.DrawFn, op: Op) -> Op:
    exact = tuple(value for value in op.inputs if draw(st.integers(0, 2)) == 0)
    return op.model_copy(update={"exact_inputs": exact})


@st.composite
def _small_codecs(draw: st.DrawFn, measure: ClassMeasure, codecs: Sequence[str]) -> ClassMeasure:
    sizes = {codec: tuple(draw(st.integers(0, 12)) for _ in measure.value_bytes) for codec in codecs}
    seconds = {codec: tuple(draw(st.integers(0, 2)) / 2 for _ in measure.value_bytes) for codec in codecs}
    return measure.model_copy(update={"codec_bytes": sizes, "codec_seconds": seconds})
