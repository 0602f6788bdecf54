"""The gradient of each step of TRL's trainers, and compressing plans whose error in it is known."""

from __future__ import annotations

import math
from typing import Any

import plans
import tolerances
import torch

from hilore_plan.graph.recovery_units import BlockGraph

LEVELS = 127
# nothing is learned: each step's gradient is that of the same parameters with and without a plan
STILL: dict[str, Any] = {"learning_rate": 0.0, "max_grad_norm": 0.0}
Gradients = list[dict[str, torch.Tensor]]


def int8_everywhere(graphs: list[BlockGraph]) -> list[dict[str, Any]]:
    """Every unit that a plan of the tool's own would compress.

    None is as small as a number a token, where padding would share its group with other tokens. With attention's output
    kept, its q and k stay exact, and its mask always, whose -inf no codec can hold.
    """
    chosen = plans.choose(graphs, plans.compress("int8"))
    for graph, actions in zip(graphs, chosen, strict=True):
        attention = [op for op in graph.ops if op.name.endswith("sdpa")]
        exact = {value for op in attention for value in (*op.inputs[:2], *op.inputs[3:], *op.outputs[1:])}
        exact |= {index for index, value in enumerate(graph.values) if value.fake.shape[-1:] == (1,)}
        actions.update({name: "store" for index in exact if (name := graph.values[index].name) in actions})
    return chosen


def risk_of(graphs: list[BlockGraph]) -> float:
    """The error that compressing everything may make, for a plan to predict."""
    units = max(sum(value.keepable and value.kind == "op" for value in graph.values) for graph in graphs)
    return tolerances.compressed_gradient(LEVELS, units)


def recorder(gradients: Gradients) -> Any:
    """A trainer's callback that keeps the gradient of each step, before the optimizer sees it."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            named = known["model"].named_parameters()
            gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    return Recorder()


def relative_errors(got: Gradients, want: Gradients) -> list[float]:
    return [_norm([g[n] - w[n] for n in w]) / _norm(list(w.values())) for g, w in zip(got, want, strict=True)]


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
