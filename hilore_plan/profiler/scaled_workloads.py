"""The sizes of micro-batch at which a profile is measured."""

from __future__ import annotations

import math

from hilore_plan.schema.record import Workload


def scaled_workloads(workload: Workload, token_points: int) -> list[Workload]:
    """The workload at `1/n, 2/n, ..., 1` of its length, prompt and response in proportion; ascending, each once."""
    made = {}
    for part in range(1, token_points + 1):
        length = math.ceil((workload.prompt_tokens + workload.response_tokens) * part / token_points)
        # at least two tokens: one to predict, and one to predict it from
        prompt = min(round(workload.prompt_tokens * part / token_points), max(length - 1, 0))
        changes = {"prompt_tokens": prompt, "response_tokens": max(length - prompt, 2 if prompt == 0 else 1)}
        scaled = workload if part == token_points else workload.model_copy(update=changes)
        made[scaled.tokens] = scaled
    return [made[tokens] for tokens in sorted(made) if tokens <= workload.tokens]
