"""verl's own FSDP2 engine on one rank of gloo, on a CPU: the parameters after its steps are those without a plan.

Runs where verl is installed, in an environment of its own: verl 0.9.1 asks for transformers below 5.11 and trl 0.27.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from setups.distributed_setups import CASE, SIZES

from hilore_plan.integrations.verl import attach_to

pytestmark = [
    pytest.mark.setups,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="needs verl: pip install 'hilore-plan[verl]' in a fresh venv"
    ),
    pytest.mark.filterwarnings("ignore"),  # verl's own
]
LENGTHS = (7, 9, 5, 8)
STEPS, ROWS = 2, 2


@pytest.fixture
def model_folder(tmp_path: Path) -> Iterator[Path]:
    """A tiny model, one rank, and a CPU for a platform: verl knows accelerators only, and takes others by plug-in."""
    from verl.plugin.platform import platform_cuda, platform_manager

    class Cpu(platform_cuda.PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager.set_platform(Cpu())
    CASE.build(**SIZES).save_pretrained(tmp_path / "model")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield tmp_path / "model"
    torch.distributed.destroy_process_group()


def make_engine(folder: Path, strategy: str, *, unpadded: bool, precision: str, lora: int) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import FSDPEngineWithLMHead

    mixed = {"param_dtype": precision, "reduce_dtype": "fp32"}
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=unpadded,
        lora_rank=lora,
    )
    engine = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(strategy=strategy, use_torch_compile=False, mixed_precision=mixed),
        FSDPOptimizerConfig(lr=1e-2),
        CheckpointConfig(),
    )
    torch.manual_seed(0)  # for adapters
    engine._build_model_optimizer()
    return engine


def make_data(step: int, *, unpadded: bool) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    columns = {
        "input_ids": nested([torch.arange(3 + step, 3 + step + length) for length in LENGTHS]),
        "position_ids": nested([torch.arange(length) for length in LENGTHS]),
        "loss_mask": nested([torch.ones(length) for length in LENGTHS]),
    }
    data = TensorDict(columns, batch_size=len(LENGTHS))
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": ROWS, "temperature": 1.0}
    tensordict_utils.assign_non_tensor(data, **settings, use_remove_padding=unpadded, use_fused_kernels=False)
    return data


def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    logps = model_output["log_probs"].values()
    return (logps * torch.cos(torch.arange(logps.numel()) * 1.7)).sum() / 10, {}


def train(engine: Any, *, unpadded: bool) -> dict[str, torch.Tensor]:
    with engine.train_mode():
        for step in range(STEPS):
            engine.train_batch(make_data(step, unpadded=unpadded), loss)
    with engine.eval_mode(), torch.no_grad():
        engine.infer_batch(make_data(0, unpadded=unpadded), loss)
    return {name: parameter.full_tensor() for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize("unpadded", [False, True])
@pytest.mark.parametrize(("precision", "lora"), [("fp32", 0), ("bf16", 0), ("bf16", 4)])
def test_the_fsdp2_engine_ends_with_the_same_parameters(
    model_folder: Path, unpadded: bool, precision: str, lora: int
) -> None:
    from verl.workers.engine import FSDPEngineWithLMHead

    settings: dict[str, Any] = {"unpadded": unpadded, "precision": precision, "lora": lora}
    want = train(make_engine(model_folder, "fsdp2", **settings), unpadded=unpadded)
    engine = make_engine(model_folder, "fsdp2", **settings)
    plan = plans.make_plan(engine.module)
    if precision == "bf16":  # what the policy makes of the parameters in forward
        plan = as_bf16(plan)
    attachment = attach_to(FSDPEngineWithLMHead, plan)
    try:
        got = train(engine, unpadded=unpadded)
        (report,) = attachment.reports
    finally:
        attachment.undo()
    micro_batches = STEPS * len(LENGTHS) // ROWS
    assert report.frames == micro_batches * SIZES["num_hidden_layers"]
    assert report.programs_run > 0
    assert not report.fallbacks
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def as_bf16(plan: Any) -> Any:
    classes = tuple(
        kind.model_copy(
            update={"parameters": {n: d.replace("float32[", "bfloat16[") for n, d in kind.parameters.items()}}
        )
        for kind in plan.classes
    )
    return plan.model_copy(update={"classes": classes})
