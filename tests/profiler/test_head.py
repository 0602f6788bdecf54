"""The fused head against the naive one: values and gradients."""

from __future__ import annotations

import pytest
import torch

from hilore_plan.profiler import head
from hilore_plan.profiler.head import FusedLogProbs, HeadScale
from hilore_plan.profiler.memory import Recorder

ROWS, HIDDEN, VOCABULARY = 12, 16, 101


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """A sum of `terms` products in another order differs by about `terms * eps` of its size; factor 8 for tails."""
    return 8 * terms * torch.finfo(dtype).eps


def tensors(dtype: torch.dtype, bias: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)]
    made: list[torch.Tensor | None] = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    return made if bias else [*made[:2], None]


def naive(tensors: list[torch.Tensor | None], targets: torch.Tensor, scale: HeadScale) -> torch.Tensor:
    hidden, weight, bias = tensors
    return head.full_log_probs(scale.apply(torch.nn.functional.linear(hidden, weight, bias)), targets)


@pytest.mark.parametrize("tile_bytes", [4 * ROWS * 7, 4 * ROWS * 1000], ids=["many-tiles", "one-tile"])
@pytest.mark.parametrize("scale", [HeadScale(), HeadScale(0.5), HeadScale(2.0, 3.0)], ids=["plain", "half", "softcap"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_equal_the_naive_ones(
    monkeypatch: pytest.MonkeyPatch, tile_bytes: int, scale: HeadScale, bias: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(head, "_TILE_BYTES", tile_bytes)
    inputs = tensors(dtype, bias)
    targets = torch.arange(ROWS) * 9 % VOCABULARY
    upstream = torch.linspace(-1, 1, ROWS, dtype=dtype)
    fused = FusedLogProbs.apply(*inputs, targets, scale)
    expected = naive(inputs, targets, scale)
    wanted = [t for t in inputs if t is not None]
    close = tolerance(dtype, VOCABULARY)
    torch.testing.assert_close(fused, expected, rtol=close, atol=close)
    got = torch.autograd.grad(fused, wanted, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(expected, wanted, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close * float(theirs.abs().max()))


def test_gradcheck() -> None:
    hidden, weight, bias = tensors(torch.float64, True)
    assert isinstance(hidden, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    small = tuple(t.detach()[:5].clone().requires_grad_() for t in (hidden, weight, bias))
    targets = torch.arange(5)
    assert torch.autograd.gradcheck(lambda h, w, b: FusedLogProbs.apply(h, w, b, targets, HeadScale(1.5, 4.0)), small)


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, _ = tensors(torch.float32, False)
    assert isinstance(hidden, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    weight.requires_grad_(False)
    FusedLogProbs.apply(hidden, weight, None, torch.zeros(ROWS, dtype=torch.long), HeadScale()).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_the_complete_logits_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, hidden_size, vocabulary = 64, 8, 4096
    monkeypatch.setattr(head, "_TILE_BYTES", 4 * rows * 256)
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)
    with Recorder(torch.device("cpu")) as recorder:
        FusedLogProbs.apply(hidden, weight, None, targets, HeadScale()).sum().backward()
    assert recorder.trace.peak_bytes < 4 * rows * vocabulary / 2 + weight.nbytes * 1.1
