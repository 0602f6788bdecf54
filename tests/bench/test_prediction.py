"""What a plan predicts for an update whose micro-batches differ in exposure."""

from __future__ import annotations

import compressed
import pytest

from hilore_plan.bench.prediction import predicted_step


def test_seconds_are_averaged_and_the_peak_is_the_highest() -> None:
    plan = compressed.plan()
    last = [entry for entry in plan.entries if entry.tokens_up_to == plan.entries[-1].tokens_up_to]
    changed = [
        entry.model_copy(
            update={"predicted": entry.predicted.model_copy(update={"step_seconds": 1.0 + n, "peak_bytes": 100 - n})}
        )
        for n, entry in enumerate(last)
    ]
    workload = plan.workload.model_copy(
        update={"batch": 1, "prompt_tokens": 0, "response_tokens": last[0].tokens_up_to}
    )
    plan = plan.model_copy(update={"entries": tuple(changed), "workload": workload})
    mode = predicted_step(plan, [0.0, 9.0])
    assert mode.step_seconds == pytest.approx((1.0 + 3.0) / 2)
    assert mode.peak_bytes == 100
