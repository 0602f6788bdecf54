"""Which modules count as the repeated blocks, and under which names."""

from __future__ import annotations

import copy

import peft
import pytest
from models import FAMILIES, Plain, Stack
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.graph.blocks import find_blocks


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_decoder_layers_are_found(family: str) -> None:
    model = FAMILIES[family].build()
    found = find_blocks(model)
    assert len(found) == model.config.num_hidden_layers
    assert dict(model.named_modules()).items() >= dict(found).items()
    assert len({type(block) for _, block in found}) == 1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.24
def test_a_wrapper_leaves_the_list_in_place() -> None:
    model = FAMILIES["llama"].build()
    plain = names(model)
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    assert names(wrapped) == [f"base_model.model.{name}" for name in plain]
    assert names(nn.ModuleDict({"module": model})) == [f"module.{name}" for name in plain]


def test_experts_inside_a_block_are_not_taken_for_blocks() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Plain() for _ in range(8))

    model = nn.Module()
    model.tower = nn.ModuleList(Mixture() for _ in range(2))
    assert names(model) == ["tower.0", "tower.1"]


def test_the_list_with_the_most_parameters_is_taken() -> None:
    model = nn.Module()
    model.few = nn.ModuleList(Plain() for _ in range(2))
    model.many = nn.Sequential(*(Plain() for _ in range(5)))
    assert names(model) == [f"many.{i}" for i in range(5)]


def test_lists_of_single_layers_or_of_different_modules_do_not_count() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    model.mixed = nn.ModuleList([Plain(), nn.TransformerEncoderLayer(8, 2)])
    with pytest.raises(UsageError, match=r"no repeated blocks found in Module(?s:.*)blocks="):
        find_blocks(model)


def test_blocks_may_be_listed() -> None:
    model = Stack(Plain, 3)
    found = find_blocks(model, ["layers.2", model.layers[0]])
    assert found == [("layers.2", model.layers[2]), ("layers.0", model.layers[0])]
    for stranger in ("layers.7", Plain()):
        with pytest.raises(UsageError, match="is not a module of Stack"):
            find_blocks(model, [stranger])
