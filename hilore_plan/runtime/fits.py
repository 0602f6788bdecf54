"""Whether a plan was made for this model: its blocks' number, and the parameters of each."""

from __future__ import annotations

from torch import nn

from hilore_plan.errors import PlanMismatchError
from hilore_plan.graph.blocks import NamedBlocks
from hilore_plan.graph.capture import block_state
from hilore_plan.graph.recovery_units import parameter_descriptions
from hilore_plan.runtime.sharded import is_shard
from hilore_plan.schema.plan import Fingerprint, Plan


def check_model(blocks: NamedBlocks, plan: Plan) -> None:
    """Compare a model's blocks with those of a plan.

    What FSDP2 makes of a shard, its mixed precision decides in forward: until then a shard may have any dtype.

    Raises:
        PlanMismatchError: they differ in number or in their parameters; the message says how.
    """
    if len(blocks) != len(plan.block_names):
        raise PlanMismatchError(
            f"the plan is for {plan.model.name} with {len(plan.block_names)} blocks; this model has {len(blocks)}",
            "make a plan for this model: hilore profile, then hilore plan",
        )
    for kind in plan.classes:
        for index in kind.blocks:
            name, block = blocks[index]
            _compare(name, _described(block, kind.parameters), kind, plan.model.name)


def check_parameters(index: int, name: str, block: nn.Module, plan: Plan) -> None:
    """Compare one block, in its forward, with the plan's: all its parameters are whole and of the dtype that counts.

    Raises:
        PlanMismatchError: they differ.
    """
    for kind in plan.classes:
        if index in kind.blocks:
            _compare(name, parameter_descriptions(block), kind, plan.model.name)


def _described(block: nn.Module, expected: dict[str, str]) -> dict[str, str]:
    found = parameter_descriptions(block)
    shards = [key for key, tensor in block_state(block).items() if is_shard(tensor)]
    return {**found, **{key: expected[key] for key in shards if _shape(expected.get(key)) == _shape(found[key])}}


def _shape(description: str | None) -> str | None:
    """A description without its dtype: `[2560, 512] trainable`."""
    return None if description is None else description.partition("[")[2]


def _compare(name: str, found: dict[str, str], kind: Fingerprint, model: str) -> None:
    expected = kind.parameters
    differing = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
    differing = [key for key in differing if not _is_idle_adapter(key, found, expected)]
    if differing:
        key = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise PlanMismatchError(
            f"the plan is for {model}: there {key} of {name} is {expected.get(key, 'absent')}, "
            f"here it is {found.get(key, 'absent')}{more}",
            "profile the model as it trains (dtype, LoRA, frozen layers), then plan again",
        )


def _is_idle_adapter(key: str, found: dict[str, str], expected: dict[str, str]) -> bool:
    """Whether a parameter belongs to an adapter that came later and isn't trained: TRL adds one as its reference."""
    added = key in found and key not in expected
    return added and ".lora_" in f".{key}" and not found[key].endswith("trainable")
