"""What each rank of a job runs of which one comes to grief: `torchrun -m setups.distributed_fails`."""

from __future__ import annotations

import plans
import torch
from setups.distributed_setups import CASE, SETUPS, layers_of
from torch import distributed as dist

from hilore_plan.runtime.attach import apply

UNLUCKY = 1


def main() -> None:
    dist.init_process_group("gloo")  # with torch's own limit of half an hour
    model = SETUPS["ddp"].wrap(SETUPS["ddp"].build())
    apply(model, plans.make_plan(model))
    loss = CASE.loss(model, CASE.make_inputs(2, 9, seed=0))
    if dist.get_rank() == UNLUCKY:
        with torch.no_grad():
            for parameter in layers_of(model).parameters():
                parameter.mul_(2.0)
    loss.backward()


if __name__ == "__main__":
    main()
