"""Training loops as people write them around plain PyTorch: each trains a model for a few steps, and does no more.

A loop is called once with a model under a plan and once with its twin without one, and must leave both the same.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import torch
from models import Case
from torch import nn

STEPS = 2
Loop = Callable[[Case, nn.Module], None]
Inputs = dict[str, torch.Tensor]


def batches(case: Case, steps: int = STEPS) -> Iterator[Inputs]:
    """A micro-batch for each step, no two of one length."""
    for step in range(steps):
        yield case.make_inputs(2, 8 + step, seed=step)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that turns the least difference between two gradients into another parameter."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def clipping_by_norm(case: Case, model: nn.Module) -> None:
    optimizer = adam(model)
    for inputs in batches(case):
        case.loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def clipping_by_value(case: Case, model: nn.Module) -> None:
    optimizer = adam(model)
    for inputs in batches(case):
        case.loss(model, inputs).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def accumulating(case: Case, model: nn.Module) -> None:
    optimizer = adam(model)
    for number, inputs in enumerate(batches(case, 4)):
        (case.loss(model, inputs) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def scaling_fp16(case: Case, model: nn.Module) -> None:
    """The scale is too high at first, so that a step is skipped and the scale comes down."""
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=1)
    before = scaler.get_scale()
    for inputs in batches(case, 3):
        with torch.autocast("cpu", torch.float16):
            loss = case.loss(model, inputs)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 1.0 < scaler.get_scale() < before


def optimizing_within_backward(case: Case, model: nn.Module) -> None:
    """Each parameter steps as soon as its gradient is there, while backward is still under way, and lets go of it."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for inputs in batches(case, 3):
        case.loss(model, inputs).backward()
        assert all(p.grad is None for p in model.parameters())
    for handle in handles:
        handle.remove()


def offloading_the_optimizer(case: Case, model: nn.Module) -> None:
    """Masters in fp64, as if on another device: gradients move there as they come, and parameters are copied back."""
    masters = {p: p.detach().double().requires_grad_() for p in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01)

    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        masters[parameter].grad = parameter.grad.double()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(move) for p in model.parameters()]
    for inputs in batches(case, 3):
        case.loss(model, inputs).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    for handle in handles:
        handle.remove()


def closures(case: Case, model: nn.Module) -> None:
    """L-BFGS runs forward and backward as often as it likes within one step."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for inputs in batches(case):

        def again(inputs: Inputs = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = case.loss(model, inputs)
            loss.backward()
            return loss

        optimizer.step(again)


def averaging_copies(case: Case, model: nn.Module) -> None:
    """A moving average of the model, which begins as a copy, and which is evaluated in between."""
    optimizer = adam(model)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new)
    for inputs in batches(case):
        case.loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            case.loss(average, inputs)
    model.load_state_dict(average.module.state_dict())


def evaluating_between(case: Case, model: nn.Module) -> None:
    """Rollouts under `inference_mode` come first, and evaluation in between."""
    optimizer = adam(model)
    for inputs in batches(case):
        with torch.inference_mode():
            case.loss(model, inputs)
        model.eval()
        with torch.no_grad():
            case.loss(model, inputs)
        case.loss(model, inputs).backward()  # in evaluation mode: nothing is planned, and nothing is lost
        model.train()
        case.loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


def freezing_by_turns(case: Case, model: nn.Module) -> None:
    """Another part of the model is frozen in each step, a whole block in one of them."""
    optimizer = adam(model)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    parts = [blocks[0], next(blocks[1].parameters()), *[next(iter(p.children())) for p in blocks[2:]]]
    for inputs, part in zip(batches(case, len(parts)), parts, strict=True):
        part.requires_grad_(False)
        case.loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        part.requires_grad_(True)


def moving_between_dtypes(case: Case, model: nn.Module) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    for dtype, inputs in zip(dtypes, batches(case, len(dtypes)), strict=True):
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        case.loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


def training_in_a_thread(case: Case, model: nn.Module) -> None:
    """Forward here, backward there."""
    optimizer = adam(model)
    for inputs in batches(case):
        thread = threading.Thread(target=case.loss(model, inputs).backward)
        thread.start()
        thread.join()
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware(case: Case, model: nn.Module) -> None:
    """Two gradients a step, the second from where the first one leads, and back."""
    optimizer = adam(model)
    for inputs in batches(case):
        case.loss(model, inputs).backward()
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.1)
        optimizer.zero_grad()
        case.loss(model, inputs).backward()
        model.load_state_dict(before)
        optimizer.step()
        optimizer.zero_grad()


def functional_calls(case: Case, model: nn.Module) -> None:
    """Parameters live outside of the model, as in meta-learning: fast weights, a step away from the slow ones."""

    class With(nn.Module):
        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(model, fast, kwargs=inputs)
            return result

    optimizer = adam(model)
    for inputs in batches(case):
        fast = {name: p * 0.5 for name, p in model.named_parameters()}
        case.loss(With(), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        clipping_by_norm,
        clipping_by_value,
        accumulating,
        scaling_fp16,
        optimizing_within_backward,
        offloading_the_optimizer,
        closures,
        averaging_copies,
        evaluating_between,
        freezing_by_turns,
        moving_between_dtypes,
        training_in_a_thread,
        sharpness_aware,
        functional_calls,
    )
}


def train(loop: Loop, case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a loop leaves."""
    loop(case, model)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
