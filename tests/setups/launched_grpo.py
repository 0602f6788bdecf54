"""A user's training script, with nothing of hilore in it: `launched_grpo.py FOLDER WEIGHTS`.

Writes the parameters that each rank ends with to `WEIGHTS.RANK`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from setups.trl_runs import Setup, make_grpo


def main(folder: Path, weights: str) -> None:
    warnings.simplefilter("ignore")  # the libraries' own
    trainer = make_grpo(Setup({"save_strategy": "no"}), folder)
    torch.manual_seed(1)
    trainer.train()
    sys.stdout.write(f"spread by {trainer.accelerator.distributed_type.value}\n")
    named = trainer.model.named_parameters()
    torch.save({name: parameter.detach() for name, parameter in named}, f"{weights}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
