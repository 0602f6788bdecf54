"""Five hundred steps of changing lengths with the garbage collector off: memory stays flat, no step gets slower."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import plans
import pytest
import tolerances
import torch
from models import Case
from runtime.rig import LLAMA, Attach, collector_off, live_tensors
from torch import nn

from hilore_plan.profiler.memory import storage_bytes
from hilore_plan.runtime.attach import Runtime
from hilore_plan.runtime.frame import live_frames
from hilore_plan.runtime.meter import LEAST

pytestmark = pytest.mark.soak
STEPS = 500
WINDOW = 100
# a window's 200 micro-batches have each length with each exposure once; one is beyond the plan's largest bucket
LENGTHS = (9, 24, 5, 40, 12, 33, 7, 18, 61, 15, 28, 6, 50, 11, 21, 36, 8, 44, 14, 30)
BUCKETS = (40, 80, 120)
# said and true exposures of a micro-batch, relative to the mean: free, low, high, and three that turn out riskier
EXPOSURES = (
    *((0.0, 0.0), (0.5, 0.5), (2.0, 2.0), (0.5, 2.0), (0.0, 0.4)),
    *((0.5, 0.9), (0.0, 3.0), (9.0, 0.1), (0.0, 0.0), (0.7, 0.7)),
)


def exact(attach: Attach, model: nn.Module) -> Runtime:
    """Some of everything that is exact, other in each bucket of tokens."""
    return attach.chosen(LLAMA, plans.seeded(2), model, tokens=BUCKETS)


def compressed(attach: Attach, model: nn.Module) -> Runtime:
    """Three buckets of exposure: the less exposed, the coarser."""
    low, middle = (attach.actions(LLAMA, plans.compress(codec), model) for codec in ("int4", "int8"))
    high = attach.actions(LLAMA, lambda value: "recompute", model)
    plan = plans.make_plan(model, tokens=(max(BUCKETS),))
    return attach(model, plans.by_exposure(plan, (0.0, 0.02, low), (1.0, 0.01, middle), (None, 0.0, high)))


@dataclass
class Training:
    """A model that trains, and what each step took and left behind."""

    case: Case
    model: nn.Module
    runtime: Runtime
    seconds: list[float] = field(default_factory=list)
    done: int = 0

    def step(self) -> None:
        """Two micro-batches, an update, and now and then an evaluation."""
        began = time.process_time()
        for _ in range(2):
            self._micro_batch()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-5)
                    parameter.grad = None
            if self.done % 10 == 0:
                self.model(**self.case.make_inputs(1, 7, seed=self.done))
        self.seconds.append(time.process_time() - began)

    def _micro_batch(self) -> None:
        length = LENGTHS[self.done % len(LENGTHS)]
        said, true = EXPOSURES[(self.done + self.done // len(LENGTHS)) % len(EXPOSURES)]
        self.done += 1
        self.runtime.meter.seen, self.runtime.meter.mean = LEAST, 1.0
        with self.runtime.microbatch(coefficients=torch.tensor([said])) as micro_batch:
            loss = self.case.loss(self.model, self.case.make_inputs(2, length, seed=self.done))
            logp = loss * 1.0
            micro_batch.observe(logp)
        (logp * true).backward()


def held() -> tuple[int, int]:
    """Tensors that are alive, and the bytes behind them."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return live_tensors(), storage_bytes(tensor for tensor in tensors if tensor.device.type == "cpu")


@pytest.mark.parametrize("plan", [exact, compressed], ids=["exact", "compressed"])
def test_memory_stays_flat_and_no_step_gets_slower(plan: Callable[..., Runtime], attach: Attach) -> None:
    model = LLAMA.build()
    training = Training(LLAMA, model, plan(attach, model))
    with collector_off():
        for _ in range(WINDOW):  # every length and exposure has come by
            training.step()
        before, objects = held(), len(gc.get_objects())
        for _ in range(STEPS):
            training.step()
            assert live_frames() == 0
        assert held() == before
        assert len(gc.get_objects()) - objects < STEPS // 10
    first, last = training.seconds[WINDOW : 2 * WINDOW], training.seconds[-WINDOW:]
    assert statistics.median(last) - statistics.median(first) <= tolerances.slow_down(first, last)
    report = training.runtime.report()
    assert report.frames == 2 * 3 * (WINDOW + STEPS)
    assert report.beyond_the_plan > 0
    assert (report.escalations > 0) == (plan is compressed)
    assert not report.fallbacks
    assert not report.stored_instead
