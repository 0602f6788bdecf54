"""What each rank of test_distributed runs: `python -m runtime.distributed_ranks RANK RENDEZVOUS`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import plans
import torch
from models import FAMILIES
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hilore_plan.runtime.attach import apply

RANKS = 2
CASE = FAMILIES["llama"]


def wrap_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def wrap_fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": wrap_ddp, "fsdp": wrap_fsdp}


def gradients(kind: str, rank: int, planned: bool) -> list[dict[str, torch.Tensor]]:
    """This rank's gradients of three steps, each rank with batches and lengths of its own."""
    model = WRAPPERS[kind](CASE.build())
    runtime = apply(model, plans.make_plan(model)) if planned else None
    steps = []
    for step in range(3):
        model.zero_grad(set_to_none=True)
        CASE.loss(model, CASE.make_inputs(2, 9 + 2 * rank + step, seed=10 * step + rank)).backward()
        steps.append({n: local(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})
    if runtime is not None:
        report = runtime.report()
        assert report.frames == 9, report
        assert not report.fallbacks, report
        assert not report.stored_instead, report
        runtime.detach()
    return steps


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(kind: str, want: list[dict[str, torch.Tensor]], got: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(want, got, strict=True):
        assert one
        assert one.keys() == other.keys()
        wrong = [name for name in one if not torch.equal(one[name], other[name])]
        assert not wrong, f"{kind}: {wrong}"


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        for kind in WRAPPERS:
            compare(kind, gradients(kind, rank, planned=False), gradients(kind, rank, planned=True))
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
