"""Engines that take a block's parameters apart are refused by name, whether they come before or after the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import plans
import pytest
import torch
from models import MODELS
from setups.distributed_setups import CASE, SIZES, layers_of
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hilore_plan.errors import RefusedError
from hilore_plan.runtime.attach import apply

pytestmark = [
    pytest.mark.setups,
    # torch 2.13 announces that it will shard nothing for one process
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp1(model: nn.Module, keep_parameters: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=keep_parameters, device_id=cpu)


def zero3(model: nn.Module) -> nn.Module:
    """What DeepSpeed does to parameters: each gets an id, its own shard, and an empty tensor in place of its data."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
        parameter.ds_tensor = parameter.data.clone()
        parameter.data = torch.empty(0)
    return model


def gathered(model: nn.Module) -> nn.Module:
    """Parameters of DeepSpeed's in the moment in which they are whole."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    return model


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "fsdp1-flat": (lambda model: fsdp1(model, keep_parameters=False), "FSDP1"),
    "fsdp1-parameters-kept": (lambda model: fsdp1(model, keep_parameters=True), "FSDP1"),
    "zero3": (zero3, "DeepSpeed ZeRO-3"),
    "zero3-gathered": (gathered, "DeepSpeed ZeRO-3"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", WRAPPERS)
def test_13_sharding_that_hides_parameters_is_refused_when_a_plan_comes(name: str) -> None:
    wrap, known_as = WRAPPERS[name]
    model = CASE.build(**SIZES)
    plan = plans.make_plan(model)
    with pytest.raises(RefusedError, match=known_as) as caught:
        apply(wrap(model), plan)
    assert "FSDP2 (torch.distributed.fsdp.fully_shard" in caught.value.hint


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "zero3"])
def test_13_sharding_that_comes_after_the_plan_is_refused_at_the_first_forward(name: str) -> None:
    wrap, known_as = WRAPPERS[name]
    model = CASE.build(**SIZES)
    with apply(model, plans.make_plan(model)):
        wrapped = wrap(model)
        with pytest.raises(RefusedError, match=known_as):
            CASE.loss(wrapped, CASE.make_inputs(2, 9, seed=0))


def test_nothing_is_imported_to_refuse_it() -> None:
    """FSDP1 is looked for only where somebody has imported it."""
    import subprocess

    code = "import sys, hilore_plan.runtime.sharded; print('torch.distributed.fsdp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# transformers 5.24 is about to call it otherwise
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_reentrant_checkpointing_by_transformers_is_refused_with_what_to_use() -> None:
    model = CASE.build(**SIZES)
    plan = plans.make_plan(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RefusedError, match="use_reentrant=True") as caught:
        apply(model, plan)
    assert '{"use_reentrant": False}' in caught.value.hint


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_a_planned_block(reentrant: bool) -> None:
    """By the user's own loop: refused if reentrant; otherwise the block saves nothing that the checkpoint could see."""
    block = MODELS["plain"].build(depth=2)
    inputs = MODELS["plain"].make_inputs(2, 9, seed=0)["input_ids"]

    def backward() -> list[torch.Tensor]:
        block.zero_grad(set_to_none=True)
        hidden = block.embedding(inputs)
        for layer in block.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden.sin().sum().backward()
        return [p.grad.clone() for p in block.parameters() if p.grad is not None]

    want = backward()
    with apply(block, plans.make_plan(block)) as runtime:
        if reentrant:
            with pytest.raises(RefusedError, match="use_reentrant=True"):
                backward()
            return
        got = backward()
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
        assert runtime.report().frames == 2
