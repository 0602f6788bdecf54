"""Train a language model on one-digit sums with TRL's GRPOTrainer, offline, on a CPU.

    python examples/train_grpo.py --model DIRECTORY

An ordinary training script. To run it under a plan, put `hilore apply PLAN --` in front of the command.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from reasoning_gym.factory import ProceduralDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\d+")


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a chat model")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--batch", type=int, default=4, help="completions per micro-batch (default 4)")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step (default 2)")
    parser.add_argument("--generations", type=int, default=4, help="completions per prompt (default 4)")
    parser.add_argument("--completion-tokens", type=int, default=24, help="most tokens of a completion (default 24)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", default="out/train_grpo", help="where TRL keeps its files")
    return parser.parse_args()


def questions(size: int, seed: int) -> tuple[ProceduralDataset, Dataset]:
    """The task with its verifier, and its questions as chat prompts."""
    task = reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    rows = [{"prompt": [{"role": "user", "content": entry["question"]}], "index": i} for i, entry in enumerate(task)]
    return task, Dataset.from_list(rows)


def reward_of(task: ProceduralDataset) -> Callable[..., list[float]]:
    """A reward function: the verifier's score of the last number that a completion names."""

    def correct(completions: list[Any], index: list[int], **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [score(text, task[i]) for text, i in zip(texts, index, strict=True)]

    def score(text: str, entry: dict[str, Any]) -> float:
        numbers = NUMBER.findall(text)
        return float(task.score_answer(numbers[-1] if numbers else None, entry))

    return correct


class StepTimes(TrainerCallback):
    """Prints a line per step: seconds (generation, reward, forward, backward, optimizer), loss, reward, gradient."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """The clock starts."""
        self.began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """The clock stops."""
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        """One line about the step that just ended."""
        if "reward" in logs:
            print(
                f"step {len(self.seconds)}/{self.steps}  {self.seconds[-1]:6.2f} s  loss {float(logs['loss']):+.4f}  "
                f"reward {float(logs['reward']):.2f}  gradient norm {float(logs['grad_norm']):.3f}",
                flush=True,
            )


def main() -> None:
    """Loads, trains, and prints what a step took."""
    asked = options()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    task, dataset = questions(size=max(64, asked.steps * asked.batch * asked.accumulation), seed=asked.seed)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype))
    config = GRPOConfig(
        output_dir=asked.output,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch,
        gradient_accumulation_steps=asked.accumulation,
        num_generations=asked.generations,
        generation_kwargs={"use_cache": True},  # TrainingArguments turns the cache off, also for generating
        max_completion_length=asked.completion_tokens,
        learning_rate=asked.learning_rate,
        gradient_checkpointing=asked.gradient_checkpointing,
        bf16=False,  # the weights have the dtype asked for: no autocast
        use_cpu=True,
        seed=asked.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    times = StepTimes(asked.steps)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_of(task),
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print(f"median step {statistics.median(times.seconds):.2f} s over {len(times.seconds)} steps")


if __name__ == "__main__":
    main()
