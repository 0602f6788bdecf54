"""Blocks that cannot be captured run as they would without a plan: checkpointed, or stored where a rerun would show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import Case, Plain, Stack
from runtime.rig import (
    PLAIN,
    Attach,
    assert_bit_equal,
    assert_plan_is_exact,
    collector_off,
    live_tensors,
    no_warnings,
)
from torch import nn
from torch.nn import functional

from hilore_plan.runtime.block import HiloreWarning


class Branches(Plain):
    """Goes one way or the other by its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(torch.tanh(h) if h.sum().item() > 0 else torch.sigmoid(h))


class CountsAndBranches(Branches):
    """Counts its calls in a Python attribute, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 + 0.1 * self.calls)


class Counts(Plain):
    """Counts its calls, and can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class BranchesWithDropout(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x), 0.1)


class TakesAnObject(Plain):
    """Is called with something that can be part of no graph."""

    def forward(self, x: torch.Tensor, what: object = None) -> torch.Tensor:
        return super().forward(x)


class GivesAnObject(Stack):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, what=self.layers)
        return self.head(hidden)


def case_of(block: Callable[[], nn.Module], stack: type[Stack] = Stack) -> Case:
    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return stack(block, 2).to(dtype).train()

    return Case(block.__name__, build)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (case_of(Branches), "data-dependent"),
        (case_of(BranchesWithDropout), "data-dependent"),
        (case_of(TakesAnObject, GivesAnObject), "ModuleList cannot be part of a graph"),
    ],
    ids=["branch", "branch_and_dropout", "argument"],
)
def test_it_is_checkpointed_bit_equal_with_one_warning_a_block(case: Case, reason: str, attach: Attach) -> None:
    model = case.build()
    runtime = attach(model)
    with pytest.warns(HiloreWarning, match="hilore: block layers") as caught:
        assert_plan_is_exact(case, runtime, model, steps=3)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    for index, text in enumerate(texts):
        assert f"block layers.{index}: cannot be captured" in text
        assert reason in text
        assert text.endswith("checkpointed")
    report = runtime.report()
    assert set(report.fallbacks) == {"layers.0", "layers.1"}
    assert all(reason in text for text in report.fallbacks.values())
    assert "fell back: layers.0" in str(report)


def test_a_checkpointed_block_keeps_nothing_of_its_inside(attach: Attach) -> None:
    case = case_of(Branches)
    model = case.build()
    runs: list[int] = []
    model.layers[0].up.register_forward_hook(lambda module, args, out: runs.append(1))
    attach(model)
    with pytest.warns(HiloreWarning, match="checkpointed"):
        case.gradients(model, case.make_inputs(2, 9, seed=0))
    runs.clear()
    loss = case.loss(model, case.make_inputs(2, 9, seed=0))
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2


def test_a_block_that_counts_its_calls_and_cannot_be_captured_is_stored(attach: Attach) -> None:
    case = case_of(CountsAndBranches)
    model = case.build()
    runtime = attach(model)
    with pytest.warns(HiloreWarning, match="stored, as its forward changes its own state"):
        assert_plan_is_exact(case, runtime, model, steps=3)
    assert [layer.calls for layer in model.layers] == [3, 3]


def test_a_block_that_counts_its_calls_is_not_counted_twice(attach: Attach) -> None:
    case = case_of(Counts)
    model = case.build()
    runtime = attach(model)
    with no_warnings():
        assert_plan_is_exact(case, runtime, model, steps=3)
    assert [layer.calls for layer in model.layers] == [3, 3]
    assert not runtime.report().fallbacks


def test_a_block_that_falls_back_does_not_hold_on_to_what_it_was_given(attach: Attach) -> None:
    case = case_of(Branches)
    model = case.build()
    attach(model)
    with pytest.warns(HiloreWarning, match="checkpointed"):
        case.gradients(model, case.make_inputs(2, 9, seed=0))
    with collector_off():
        before = live_tensors()
        for seed in range(3):
            case.gradients(model, case.make_inputs(2, 9, seed=seed))
        assert live_tensors() == before


def test_one_block_that_falls_back_does_not_spoil_the_others(attach: Attach) -> None:
    class Sometimes(Plain):
        number = 0

        def __init__(self) -> None:
            super().__init__()
            Sometimes.number += 1
            self.branches = Sometimes.number % 2 == 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if not self.branches or y.sum().item() > 0 else -y

    case = case_of(Sometimes)
    model = case.build()
    runtime = attach(model)
    with pytest.warns(HiloreWarning, match=r"layers\.1"):
        assert_plan_is_exact(case, runtime, model)
    assert list(runtime.report().fallbacks) == ["layers.1"]
    assert runtime.report().frames == 2


def test_an_error_in_a_block_that_falls_back_is_the_users_own(attach: Attach) -> None:
    case = case_of(Branches)
    model = case.build()
    attach(model)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model.layers[0](torch.zeros(2, 3, 7, requires_grad=True))
    with pytest.warns(HiloreWarning, match="checkpointed"):
        got = case.gradients(model, case.make_inputs(2, 9, seed=0))
    assert_bit_equal(got, case.gradients(case.build(), case.make_inputs(2, 9, seed=0)))
    assert PLAIN.name == "plain"
