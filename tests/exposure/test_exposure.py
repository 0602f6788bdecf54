"""The norm of the coefficients, and seeing it at the start of backward."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from exposure.reference import SETTINGS, reference_loss
from tolerances import COEFFICIENTS

from hilore_plan.errors import UsageError
from hilore_plan.exposure.coefficients import coefficients
from hilore_plan.exposure.exposure import exposure, relative
from hilore_plan.exposure.losses import LOSS_TYPES
from hilore_plan.exposure.observe import observe


def test_norms() -> None:
    found = torch.tensor([[3.0, 0.0], [-4.0, 0.0]])
    assert exposure(found) == 5
    assert exposure(found, "l1") == 7
    assert exposure(torch.zeros(0, 4)) == 0
    assert exposure(torch.full((1 << 20,), 1e-30)) == pytest.approx(1e-30 * 1024)  # squares below fp32's range
    with pytest.raises(UsageError, match="'l3'"):
        exposure(found, "l3")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_what_is_not_finite_has_no_exposure(norm: str, value: float) -> None:
    with pytest.raises(UsageError, match="not finite"):
        exposure(torch.tensor([1.0, value]), norm)  # type: ignore[arg-type]


def test_relative_to_a_mean() -> None:
    assert relative(3.0, 2.0) == 1.5
    assert relative(0.0, 2.0) == 0
    for value, mean in ((math.nan, 1.0), (-1.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan)):
        with pytest.raises(UsageError, match="exposure"):
            relative(value, mean)


@pytest.mark.parametrize("setting", ["off-policy", "everything"])
@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_backward_shows_the_exposure_of_the_true_loss(loss: str, setting: str) -> None:
    config, micro = SETTINGS[setting].config(loss, "token"), SETTINGS[setting].micro(0)
    hidden = micro.logps.clone().requires_grad_()
    logps = hidden * 1.0
    seen: list[float] = []
    observe(logps, seen.append)
    observe(logps, seen.append, norm="l1")
    reference_loss(config, type(micro)(**{**micro.arguments(), "logps": logps})).backward()  # type: ignore[arg-type]
    assert hidden.grad is not None
    found = coefficients(config, **micro.arguments(), normaliser=micro.normaliser(config))  # type: ignore[arg-type]
    assert seen == pytest.approx([exposure(found), exposure(found, "l1")], rel=COEFFICIENTS)
    assert seen[0] == pytest.approx(float(hidden.grad.norm()), rel=COEFFICIENTS)


def test_it_is_seen_before_anything_below_and_only_once() -> None:
    order: list[str] = []
    below = torch.ones(3, requires_grad=True)
    hidden = below * 2
    hidden.register_hook(lambda _: order.append("below"))  # type: ignore[no-untyped-call]
    logps = hidden * 3
    observe(logps, lambda value: order.append(f"seen {value:g}"))
    loss = (logps * 4).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert order == [f"seen {4 * math.sqrt(3):g}", "below", "below"]
    assert below.grad is not None
    assert below.grad.tolist() == [48.0] * 3  # twice, and untouched


def test_the_scale_of_the_loss_is_taken_out() -> None:
    logps = torch.ones(4, requires_grad=True) * 1.0
    seen: list[float] = []
    observe(logps, seen.append, loss_scale=1024.0)
    (logps.sum() * 1024).backward()
    assert seen == [2.0]


def test_an_overflow_is_an_infinite_exposure_and_no_error() -> None:
    logps = torch.ones(2, requires_grad=True) * 1.0
    seen: list[float] = []
    observe(logps, seen.append)
    (logps * torch.tensor([math.nan, 1.0])).sum().backward()
    assert seen == [math.inf]


def test_a_removed_hook_is_silent_and_an_error_of_the_callback_comes_out() -> None:
    logps = torch.ones(2, requires_grad=True) * 1.0
    seen: list[float] = []
    handle = observe(logps, seen.append)
    handle.remove()
    handle.remove()

    def fails(value: float) -> None:
        raise RuntimeError("mine")

    observe(logps, fails)
    with pytest.raises(RuntimeError, match="mine"):
        logps.sum().backward()
    assert seen == []


def test_log_probs_without_gradient_are_refused() -> None:
    with torch.no_grad():
        logps = torch.ones(2, requires_grad=True) * 1.0
    with pytest.raises(UsageError, match="need no gradient"):
        observe(logps, print)


def test_nothing_is_kept_alive() -> None:
    class Listener:
        def __call__(self, value: float) -> None:
            pass

    gc.collect()
    gc.disable()
    try:
        listener = Listener()
        logps = torch.ones(2, requires_grad=True) * 1.0
        handle = observe(logps, listener)
        gone = weakref.ref(logps), weakref.ref(listener)
        logps.sum().backward()
        del listener
        assert gone[1]() is None  # called, and let go
        del logps
        assert gone[0]() is None  # the handle does not hold it
        listener, logps = Listener(), torch.ones(2, requires_grad=True) * 1.0
        observe(logps, listener)
        gone = weakref.ref(logps), weakref.ref(listener)
        del listener, logps  # backward never came
        assert (gone[0](), gone[1]()) == (None, None)
        handle.remove()
    finally:
        gc.enable()
