"""verl's own FSDP2 engine and its own loss, on one rank of gloo, on a CPU.

The parameters after its steps are those without a plan, and what is predicted of a micro-batch is what backward begins
with. Runs where verl is installed, in an environment of its own (`make verl`): verl 0.9.1 asks for transformers below
5.11 and trl 0.27.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from setups.distributed_setups import CASE, SIZES

from hilore_plan.integrations.verl import attach_to
from hilore_plan.integrations.verl_exposure import MODES
from hilore_plan.runtime.block import HiloreWarning
from hilore_plan.runtime.meter import LEAST, Meter
from hilore_plan.runtime.microbatch import Microbatch
from hilore_plan.runtime.report import Report

pytestmark = [
    pytest.mark.setups,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="needs verl in an environment of its own: make verl"
    ),
    pytest.mark.filterwarnings("ignore"),  # verl's own
]
LENGTHS = (7, 9, 5, 8)
PROMPT = 3
ADVANTAGES = (0.0, 0.0, 1.5, -0.5)  # rows of the first micro-batch are without signal
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

    def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(list(rows), layout=torch.jagged)

    draw = torch.Generator().manual_seed(step)
    ids = [torch.arange(3 + step, 3 + step + length) for length in LENGTHS]
    responses = [length - PROMPT for length in LENGTHS]
    columns = {
        "input_ids": nested(ids),
        "position_ids": nested(torch.arange(length) for length in LENGTHS),
        "loss_mask": nested(torch.ones(length) for length in LENGTHS),
        "prompts": nested(row[:PROMPT] for row in ids),
        "responses": nested(row[PROMPT:] for row in ids),
        "response_mask": nested(torch.ones(length, dtype=torch.int64) for length in responses),
        "advantages": nested(
            torch.full((length,), advantage) for length, advantage in zip(responses, ADVANTAGES, strict=True)
        ),
        "old_log_probs": nested(-3 - torch.rand(length, generator=draw) for length in responses),
        "rollout_is_weights": nested(0.5 + torch.rand(length, generator=draw) for length in responses),
        "ref_log_prob": nested(-3 - torch.rand(length, generator=draw) for length in responses),
    }
    data = TensorDict(columns, batch_size=len(LENGTHS))
    settings: dict[str, Any] = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": ROWS, "temperature": 1.0}
    settings["global_batch_size"] = len(LENGTHS)
    tensordict_utils.assign_non_tensor(data, **settings, use_remove_padding=unpadded, use_fused_kernels=False)
    return data


def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    logps = model_output["log_probs"].values()
    return (logps * torch.cos(torch.arange(logps.numel()) * 1.7)).sum() / 10, {}


def train(
    engine: Any, *, unpadded: bool, loss_function: Any = loss, on_policy: bool = False
) -> dict[str, torch.Tensor]:
    with engine.train_mode():
        for step in range(STEPS):
            data = make_data(step, unpadded=unpadded)
            if on_policy:
                data["old_log_probs"] = log_probs(engine, data)
            engine.train_batch(data, loss_function)
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


def log_probs(engine: Any, data: Any) -> torch.Tensor:
    """The policy's own, as the trainer has them computed before the update: of responses, `[B, response]`."""
    found: list[torch.Tensor] = []

    def keep(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        found.extend(model_output["log_probs"].unbind())
        return torch.zeros(()), {}

    with torch.no_grad():
        engine.forward_backward_batch(data.clone(), keep, forward_only=True)
    return torch.nested.nested_tensor([row[PROMPT - 1 : -1] for row in found], layout=torch.jagged)


def policy_loss(mode: str = "vanilla", **settings: Any) -> Any:
    """verl's loss, as its worker makes it."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=ROWS,
        policy_loss=PolicyLossConfig(loss_mode=mode, dro_beta=0.1),
        **settings,
    )
    return partial(ppo_loss, config=config)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Pairs of exposures: as predicted, and as backward began."""
    found: list[tuple[float, float]] = []
    settle = Microbatch._settle

    def record(micro_batch: Microbatch, exact: float) -> None:
        assert micro_batch.absolute is not None
        found.append((micro_batch.absolute, exact))
        settle(micro_batch, exact)

    monkeypatch.setattr(Microbatch, "_settle", record)
    return found


def two_buckets(model: torch.nn.Module) -> Any:
    """Everything compressed up to the mean exposure, everything recomputed above."""
    blocks = SIZES["num_hidden_layers"]
    compressed = [{"mlp.gate_proj": "compress:int8", "mlp.up_proj": "compress:int8"}] * blocks
    return plans.by_exposure(plans.make_plan(model), (1.0, 0.01, compressed), (None, 0.0, [{}] * blocks))


def train_by_exposure(folder: Path, *, mean: float, **settings: Any) -> Report:
    """Trains under a plan with two buckets of exposure, with a mean as if it had gone on for a while."""
    from verl.workers.engine import FSDPEngineWithLMHead

    engine = make_engine(folder, "fsdp2", unpadded=True, precision="fp32", lora=0)
    attachment = attach_to(FSDPEngineWithLMHead, two_buckets(engine.module))
    try:
        attachment.runtime_of(engine).meter = Meter(seen=LEAST, mean=mean)
        train(engine, unpadded=True, **settings)
        (report,) = attachment.reports
    finally:
        attachment.undo()
    return report


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_the_prediction_is_exact(model_folder: Path, pairs: list[tuple[float, float]], mode: str) -> None:
    train_by_exposure(model_folder, mean=1.0, loss_function=policy_loss(mode), on_policy=True)
    assert len(pairs) == STEPS * len(LENGTHS) // ROWS
    assert all(math.isclose(predicted, exact, rel_tol=1e-4) for predicted, exact in pairs)
    assert [predicted > 0 for predicted, _ in pairs] == [False, True] * STEPS


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_agg_mode": "token-sum"},
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 100},
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_so_it_is_however_the_loss_is_put_together(
    model_folder: Path, pairs: list[tuple[float, float]], settings: dict[str, Any]
) -> None:
    train_by_exposure(model_folder, mean=1.0, loss_function=policy_loss(**settings), on_policy=True)
    assert len(pairs) == STEPS * len(LENGTHS) // ROWS
    assert all(math.isclose(predicted, exact, rel_tol=1e-4) for predicted, exact in pairs)
    assert all(predicted > 0 for predicted, _ in pairs) == ("use_kl_loss" in settings)


def test_each_micro_batch_gets_the_entry_of_its_exposure(model_folder: Path) -> None:
    report = train_by_exposure(model_folder, mean=1e-3, loss_function=policy_loss(), on_policy=True)
    frames = STEPS * SIZES["num_hidden_layers"]
    assert [use.frames for use in report.entries] == [frames, frames]
    assert report.escalations == 0


def test_one_that_turns_out_riskier_is_rebuilt_exactly(model_folder: Path) -> None:
    """DRO pulls towards the old log-probs: before forward, rows without an advantage seem to be without signal."""
    report = train_by_exposure(model_folder, mean=1e-6, loss_function=policy_loss("dro"))
    assert report.escalations > 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: loss, "loss is not verl's ppo_loss"),
        (lambda: policy_loss("clip_cov"), "the loss mode clip_cov is none of vanilla"),
        (lambda: policy_loss(entropy_coeff=0.01), "an entropy bonus does not pass through"),
    ],
)
def test_a_loss_that_is_not_known_counts_as_the_riskiest(model_folder: Path, make: Any, why: str) -> None:
    with pytest.warns(HiloreWarning, match=why):
        report = train_by_exposure(model_folder, mean=1.0, loss_function=make())
    assert report.entries[0].frames == 0
