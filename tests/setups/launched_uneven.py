"""A user's training script, with nothing of hilore in it: `launched_uneven.py FOLDER STEM STEPS`.

Completions differ in length, and rows of a step in signal. Nothing is learned, so that each step's gradient is that of
the same parameters. Every rank writes the gradients of its steps to `STEM.RANK`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from setups.trl_gradients import STILL, Gradients, recorder
from setups.trl_runs import Setup, make_uneven_grpo


def main(folder: Path, stem: str, steps: int) -> None:
    warnings.simplefilter("ignore")  # the libraries' own
    settings = {"max_steps": steps, "gradient_accumulation_steps": 4, "max_completion_length": 12}
    trainer = make_uneven_grpo(Setup({**STILL, **settings}), folder)
    gradients: Gradients = []
    trainer.add_callback(recorder(gradients))
    torch.manual_seed(1)
    trainer.train()
    torch.save(gradients, f"{stem}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
