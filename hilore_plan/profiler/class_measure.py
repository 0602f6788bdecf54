"""All that is measured of one class of blocks at one size, as the profile has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hilore_plan.profiler.formats import CodecMeasures
from hilore_plan.profiler.ops import OpMeasures
from hilore_plan.schema.profile import ClassMeasure


def class_measure(
    measures: OpMeasures,
    formats: CodecMeasures,
    working: tuple[tuple[int, ...], int],
    asked: Sequence[Mapping[int, int]],
) -> ClassMeasure:
    """The record.

    Args:
        measures: of its ops and values.
        formats: of the codecs.
        working: bytes that each stage of backward, and forward, need beyond their values.
        asked: by stage, what is held beyond its values when each is first asked for; empty if nobody looked.
    """
    stages, forward = working
    seen = any(asked)
    return ClassMeasure(
        value_bytes=measures.value_bytes,
        op_seconds=measures.op_seconds,
        op_working_bytes=measures.op_working_bytes,
        narrow_bytes=measures.narrow_bytes,
        narrow_seconds=measures.narrow_seconds,
        stage_working_bytes=stages,
        forward_working_bytes=forward,
        asked_values=tuple(tuple(stage) for stage in asked) if seen else (),
        asked_bytes=tuple(tuple(stage.values()) for stage in asked) if seen else (),
        codec_bytes=formats.bytes,
        codec_seconds=formats.seconds,
    )
