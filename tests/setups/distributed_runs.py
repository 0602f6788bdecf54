"""What each rank of test_distributed runs: `torchrun -m setups.distributed_runs FOLDER SETUP...`.

Writes `FOLDER/SETUP.RANK`: empty if all went well. A rank that fails stops, and takes the others with it.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import plans
import tolerances
import torch
from setups.collectives import Collective, Collectives
from setups.distributed_setups import BLOCKS, CASE, SETUPS, Setup
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hilore_plan.errors import PlanMismatchError
from hilore_plan.graph.recovery_units import BlockGraph
from hilore_plan.runtime.attach import Runtime, apply
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.variants import Variants
from hilore_plan.schema.plan import Group, Plan

STEPS, ACCUMULATION = 2, 2
SHORT = 22  # tokens; both ranks have micro-batches below and above, at different times
LEVELS = 127  # of int8
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """What a rank has after some steps: its gradients of each, its parameters, and the collectives it took part in."""

    gradients: list[Gradients]
    parameters: Gradients
    collectives: list[Collective]
    runtime: Runtime | None


def train(
    setup: Setup, plan: Plan | None = None, exposure: float | None = None, variants: Variants | None = None
) -> Training:
    """Some steps, each rank with micro-batches and lengths of its own; `variants` holds graphs captured before."""
    model, runtime = _prepare(setup, plan)
    if runtime is not None and variants is not None:
        runtime.variants = variants
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    gradients = []
    with Collectives() as recorded:
        for step in range(STEPS):
            optimizer.zero_grad()
            _accumulate(setup, model, step, runtime, exposure)
            gradients.append({n: _local(p.grad) for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
    parameters = {name: _local(parameter) for name, parameter in model.named_parameters()}
    if runtime is not None:
        runtime.detach()
    return Training(gradients, parameters, recorded.calls, runtime)


def _prepare(setup: Setup, plan: Plan | None) -> tuple[nn.Module, Runtime | None]:
    bare = setup.build()
    runtime = apply(bare, plan) if plan and setup.attach_first else None
    model = setup.wrap(bare)
    if plan is not None and runtime is None:
        runtime = apply(model, plan)
    return model, runtime


def _accumulate(setup: Setup, model: nn.Module, step: int, runtime: Runtime | None, exposure: float | None) -> None:
    rank = dist.get_rank()
    for number in range(ACCUMULATION):
        length = 9 + 2 * ((rank + number) % 2) + step
        inputs = CASE.make_inputs(2, length, seed=100 * rank + 10 * step + number)
        with setup.sync(model, number == ACCUMULATION - 1):
            if runtime is None:
                loss = setup.loss(model, inputs)
            else:
                with runtime.microbatch(exposure=exposure):
                    loss = setup.loss(model, inputs)
            loss.backward()


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def mixed(everything: Plan, graphs: list[BlockGraph], *, compress: bool) -> Plan:
    """Two sizes by two exposures: entries that store, cast, recompute and, at low exposure, perhaps compress."""
    short, long = (plans.choose(graphs, plans.seeded(seed)) for seed in (1, 2))
    lossy = plans.choose(graphs, plans.compress("int8"))
    base = plans.by_exposure(everything, (0.5, 0.01, lossy if compress else long), (None, 0.0, long))
    return base.model_copy(update={"entries": (*_sized(base, short, lossy if compress else short), *base.entries)})


def _sized(plan: Plan, high: Sequence[dict[str, plans.Action]], low: Sequence[dict[str, plans.Action]]) -> list[object]:
    """The entries for short micro-batches."""
    made = []
    for entry, actions in zip(plan.entries, (low, high), strict=True):
        groups = tuple(Group(class_name="block", blocks=(i,), actions=dict(a)) for i, a in enumerate(actions))
        made.append(entry.model_copy(update={"tokens_up_to": SHORT, "groups": groups}))
    return made


def check(setup: Setup) -> None:
    """A plan that is exact changes nothing at all; one that compresses, no more than it may."""
    plain = train(setup)
    everything = plans.make_plan(setup.build_as_computed())
    recomputed = train(setup, everything)
    _assert_same(plain, recomputed, setup)
    if setup.falls_back:
        return
    runtime = runtime_of(recomputed)
    graphs, variants = plans.graphs_of(runtime), runtime.variants
    exact = train(setup, mixed(everything, graphs, compress=False), variants=variants)
    _assert_same(plain, exact, setup)
    used = {entry.tokens_up_to for entry in runtime_of(exact).report().entries if entry.frames}
    assert len(used) == 2, f"only one of the plan's sizes was met: {used}"
    # rank 0 has micro-batches of low exposure, rank 1 of high: compressed here, exact there, in one step
    exposure = 0.1 if dist.get_rank() == 0 else 2.0
    lossy = mixed(everything, graphs, compress=True)
    _check_lossy(plain, train(setup, lossy, exposure, variants), graphs)
    if setup.computes is not None:
        _check_dtype_counts(setup)


def _check_dtype_counts(setup: Setup) -> None:
    """A plan for the dtype of the shards is none for that of the forward."""
    try:
        train(setup, plans.make_plan(setup.build()))
    except PlanMismatchError as error:
        assert "float32" in error.message  # noqa: PT017 - there is no pytest in a rank
        assert "here it is bfloat16" in error.message  # noqa: PT017
    else:
        raise AssertionError("a plan for fp32 ran in bf16")


def runtime_of(training: Training) -> Runtime:
    assert training.runtime is not None
    return training.runtime


def _assert_same(plain: Training, got: Training, setup: Setup) -> None:
    report = runtime_of(got).report()
    assert len(report.fallbacks) == (BLOCKS if setup.falls_back else 0), report.fallbacks
    assert not report.stored_instead, report.stored_instead
    assert report.frames == (0 if setup.falls_back else BLOCKS * STEPS * ACCUMULATION)
    for mine, other in zip(plain.gradients, got.gradients, strict=True):
        _assert_equal("gradients", mine, other)
    _assert_equal("parameters", plain.parameters, got.parameters)
    assert plain.collectives, "nothing was recorded"
    assert plain.collectives == got.collectives


def _assert_equal(what: str, one: Gradients, other: Gradients) -> None:
    assert one
    assert one.keys() == other.keys()
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    assert not wrong, f"{what} differ: {wrong}"


def _check_lossy(plain: Training, got: Training, graphs: list[BlockGraph]) -> None:
    """The first step has the same parameters in both runs; its gradient is off by no more than the codec allows."""
    one, other = plain.gradients[0], got.gradients[0]
    sums = torch.tensor(
        [
            sum(float((other[name] - one[name]).double().square().sum()) for name in one),
            sum(float(one[name].double().square().sum()) for name in one),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    error = float((sums[0] / sums[1]).sqrt())
    units = max(sum(value.keepable and value.kind == "op" for value in graph.values) for graph in graphs)
    assert 0 < error < tolerances.compressed_gradient(LEVELS, units), error
    assert plain.collectives == got.collectives


def main(folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=HiloreWarning)  # fallbacks are in the report
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        target = folder / f"{name}.{os.environ['RANK']}"
        try:
            check(SETUPS[name])
        except BaseException:
            target.write_text(traceback.format_exc())
            raise
        target.touch()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
