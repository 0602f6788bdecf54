"""What only a GPU brings about, as far as it can be had without one."""

from __future__ import annotations

import io
import json

import pytest
import torch
from torch import nn

from hilore_plan.bench.worker import serve
from hilore_plan.errors import RefusedError
from hilore_plan.profiler.environment import describe_environment
from hilore_plan.profiler.repeatable import repeatable
from hilore_plan.schema.record import Workload

CUDA = torch.device("cuda")


def too_large() -> nn.Module:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_device_without_memory_is_an_answer_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    from hilore_plan.integrations import sources

    workload = Workload(
        source="torch:too_large",
        dtype="float32",
        attention="sdpa",
        head="fused",
        batch=1,
        prompt_tokens=1,
        response_tokens=1,
    )
    monkeypatch.setattr(torch, "too_large", too_large, raising=False)
    assert sources.is_factory(workload.source)
    request = {"do": "build", "mode": "gc", "workload": workload.model_dump(), "device": "cpu", "seed": 0, "plan": None}
    answers = io.StringIO()
    serve(io.StringIO(json.dumps(request) + "\n"), answers)
    answer = json.loads(answers.getvalue())
    assert answer["error"] == "ProcessError"
    assert "no memory left" in answer["message"]
    assert "--against" in answer["hint"]


def test_a_device_is_noted_with_its_number() -> None:
    assert describe_environment(torch.device("meta", 1)).device == "meta:1"
    assert describe_environment(torch.device("cpu")).device == "cpu"


def test_gradients_are_compared_by_kernels_that_give_the_same_bits_every_time() -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with repeatable(CUDA):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled
    with repeatable(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_op_without_such_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="put_ does not have a deterministic implementation"), repeatable(CUDA):
        raise RuntimeError("put_ does not have a deterministic implementation, but you set ...\nAnd more.")
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="something else"), repeatable(CUDA):
        raise RuntimeError("something else")
    assert not torch.are_deterministic_algorithms_enabled()
