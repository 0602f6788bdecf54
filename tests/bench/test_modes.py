"""The modes: all of them give the gradient of store-everything, bit for bit, and leave the model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hilore_plan.bench.modes import AGAINST, check_modes, mode, saved_ops
from hilore_plan.bench.worker import gradient_error
from hilore_plan.bench.workload import build_workload
from hilore_plan.errors import UsageError
from hilore_plan.profiler.peaks import measure_peak
from hilore_plan.profiler.step import ActorStep
from hilore_plan.schema.record import Workload

WORKLOAD = Workload(
    source="builtin:tiny-qwen2", dtype="float32", attention="sdpa", head="fused",
    batch=2, prompt_tokens=8, response_tokens=24,
)  # fmt: skip


def gradients(step: ActorStep) -> dict[str, torch.Tensor]:
    step.backward()
    return {str(i): p.grad.clone() for i, p in enumerate(step.trainable) if p.grad is not None}


@pytest.mark.parametrize("name", AGAINST)
def test_every_mode_has_the_gradient_of_store(name: str) -> None:
    plain, other = build_workload(WORKLOAD, "cpu"), build_workload(WORKLOAD, "cpu")
    with mode(name, other.model):
        mine = gradients(other.step)
    assert gradient_error(mine, gradients(plain.step)) == 0.0
    assert not [block for block in other.model.modules() if "forward" in vars(block)]


def test_selective_modes_lie_between_checkpointing_and_storing() -> None:
    peaks = []
    for name in ("gc", "sac-attention", "sac-matmul", "store"):
        built = build_workload(WORKLOAD, "cpu")
        with mode(name, built.model):
            built.step.step()
            peaks.append(measure_peak(built.step))
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_saved_ops_hold_attention_and_matmuls() -> None:
    assert torch.ops.aten.addmm.default in saved_ops("sac-attention")
    assert torch.ops.aten.mm.default not in saved_ops("sac-attention")
    assert torch.ops.aten.mm.default in saved_ops("sac-matmul")
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in saved_ops("sac-matmul")


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown mode 'sack'"):
        check_modes(["gc", "sack"])
    with pytest.raises(UsageError, match="needs a plan"):
        mode("plan", torch.nn.Linear(1, 1))


def test_gradient_error_is_exact_and_relative() -> None:
    theirs = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    assert gradient_error({name: tensor.clone() for name, tensor in theirs.items()}, theirs) == 0.0
    moved = {"a": torch.tensor([3.0, 4.5]), "b": torch.zeros(2)}
    assert gradient_error(moved, theirs) == pytest.approx(0.1)
    assert gradient_error({"a": theirs["a"]}, theirs) == float("inf")
    broken = {"a": torch.tensor([3.0, float("nan")]), "b": torch.zeros(2)}
    assert gradient_error(broken, theirs) > 0


def test_gradient_error_survives_its_file(tmp_path: Path) -> None:
    theirs = {"a": torch.randn(5, dtype=torch.bfloat16)}
    torch.save(theirs, tmp_path / "g.pt")
    read = torch.load(tmp_path / "g.pt", mmap=True, weights_only=True)
    assert gradient_error(theirs, read) == 0.0
