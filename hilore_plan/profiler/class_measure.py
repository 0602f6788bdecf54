"""All that is measured of one class of blocks at one size, as the profile has it."""

from __future__ import annotations

from collections.abc import Sequence

from hilore_plan.profiler.formats import CodecMeasures
from hilore_plan.profiler.forward import ForwardMeasure
from hilore_plan.profiler.ops import OpMeasures
from hilore_plan.profiler.requests import StageRequests
from hilore_plan.schema.profile import ClassMeasure, Transient


def transient(working: tuple[tuple[int, ...], int], requests: Sequence[StageRequests]) -> Transient:
    """The record of what depends on the gradients that backward began with.

    Args:
        working: bytes that each stage of backward, and forward, need beyond their values.
        requests: by stage, what backward holds beyond its values; without any request if nobody looked.
    """
    stages, forward = working
    seen = any(stage.held_bytes for stage in requests)
    return Transient(
        stage_working_bytes=stages,
        forward_working_bytes=forward,
        asked_values=tuple(tuple(stage.held_bytes) for stage in requests) if seen else (),
        asked_bytes=tuple(tuple(stage.held_bytes.values()) for stage in requests) if seen else (),
        asked_peaks=tuple((stage.early_bytes, *stage.peak_bytes.values()) for stage in requests) if seen else (),
    )


def class_measure(measures: OpMeasures, formats: CodecMeasures, found: Transient, run: ForwardMeasure) -> ClassMeasure:
    """The record.

    Args:
        measures: of its ops and values.
        formats: of the codecs.
        found: what the last micro-batch of an update needs.
        run: its forward.
    """
    return ClassMeasure(
        value_bytes=measures.value_bytes,
        op_seconds=measures.op_seconds,
        op_working_bytes=measures.op_working_bytes,
        narrow_bytes=measures.narrow_bytes,
        narrow_seconds=measures.narrow_seconds,
        **dict(found),
        forward_values=run.values,
        forward_peaks=run.peak_bytes if found.asked_values else (),
        codec_bytes=formats.bytes,
        codec_seconds=formats.seconds,
    )
