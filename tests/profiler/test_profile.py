"""Profiles of tiny models: complete, valid, exact in bytes, and nothing left on the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hilore_plan.errors import DeviceError, UsageError
from hilore_plan.graph.blocks import find_blocks
from hilore_plan.integrations.builtin_models import build
from hilore_plan.planner.simulate import simulate
from hilore_plan.planner.timeline import View, view_at
from hilore_plan.profiler import profile as profile_file
from hilore_plan.profiler.calls import record_calls, shared_storages, storage_of
from hilore_plan.profiler.classes import find_classes
from hilore_plan.profiler.ops import measure_ops, reran_ops
from hilore_plan.profiler.outside import stored_bytes
from hilore_plan.profiler.peaks import measure_peak
from hilore_plan.profiler.profile import profile_module
from hilore_plan.profiler.recompute_scale import SANE_SCALE, NoisyMeasurementWarning, bounded
from hilore_plan.profiler.scaled_workloads import scaled_workloads
from hilore_plan.profiler.step import ActorStep
from hilore_plan.schema.io import load_profile, save
from hilore_plan.schema.plan import Action
from hilore_plan.schema.profile import Profile
from hilore_plan.schema.record import Workload

CPU = torch.device("cpu")
noisy = pytest.mark.filterwarnings("ignore::hilore_plan.profiler.recompute_scale.NoisyMeasurementWarning")


def workload(source: str = "builtin:tiny-llama", **changes: object) -> Workload:
    options: dict[str, object] = {
        "source": source, "dtype": "float32", "attention": "sdpa", "head": "fused",
        "batch": 2, "prompt_tokens": 4, "response_tokens": 12,
    }  # fmt: skip
    return Workload.model_validate({**options, **changes})


def profiled(load: Workload, token_points: int = 1) -> Profile:
    loaded = build(load.source, dtype=load.dtype, lora_rank=load.lora_rank)
    return profile_module(loaded.model, load, vocab_size=loaded.vocab_size, token_points=token_points)


def store_everything(view: View) -> list[dict[str, Action]]:
    """Every slot stored, every value that is none left out: what torch does by itself."""
    classes = [view.class_at(position) for position in range(len(view.blocks))]
    return [{c.names[unit]: "store" if c.slots[unit] else "recompute" for unit in c.units} for c in classes]


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "ROUNDS", 1)


@noisy
def test_a_profile_is_valid_and_survives_its_file(tmp_path: Path) -> None:
    profile = profiled(workload(), token_points=2)
    save(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert [point.tokens for point in profile.points] == [16, 32]
    assert profile.block_names == ("model.layers.0", "model.layers.1", "model.layers.2")
    (block_class,) = profile.classes
    assert block_class.blocks == (0, 1, 2)
    assert all(seconds > 0 for point in profile.points for seconds in point.classes[0].op_seconds)


@noisy
@pytest.mark.parametrize(
    "load",
    [
        workload(),
        workload(head="full"),
        workload(lora_rank=2, dtype="bfloat16"),
        workload(accumulation=False),
        workload("builtin:tiny-gpt2"),
        workload("builtin:tiny-smollm3"),
    ],
    ids=["llama", "full-head", "lora", "no-accumulation", "gpt2", "smollm3"],
)
def test_the_timeline_of_store_everything_is_the_measured_peak(load: Workload) -> None:
    profile = profiled(load)
    view = view_at(profile, profile.points[-1].tokens)
    assert simulate(view, store_everything(view)).peak_bytes == profile.points[-1].store.peak_bytes


@noisy
@pytest.mark.parametrize(
    "load",
    [workload(), workload(head="full"), workload(lora_rank=2, dtype="bfloat16"), workload("builtin:tiny-gpt2")],
    ids=["llama", "full-head", "lora", "gpt2"],
)
def test_so_it_is_for_a_micro_batch_that_begins_without_gradients(load: Workload) -> None:
    loaded = build(load.source, dtype=load.dtype, lora_rank=load.lora_rank)
    profile = profile_module(loaded.model, load, vocab_size=loaded.vocab_size, token_points=1)
    view = view_at(profile, load.tokens, "none")
    step = ActorStep(loaded.model, load, vocab_size=loaded.vocab_size, device=CPU)
    step.step()
    assert simulate(view, store_everything(view)).peak_bytes == measure_peak(step, last="none")


@noisy
def test_only_accumulation_tells_the_first_micro_batch_from_others() -> None:
    (point,) = profiled(workload(accumulation=False)).points
    assert point.without_gradients is None


@noisy
def test_checkpointing_stays_below_store_everything() -> None:
    (point,) = profiled(workload()).points
    assert point.gc.peak_bytes < point.store.peak_bytes


@noisy
def test_nothing_is_left_on_the_model() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    before = {name: dict(vars(module)) for name, module in loaded.model.named_modules()}
    profile_module(loaded.model, workload(), vocab_size=loaded.vocab_size, token_points=1)
    for name, module in loaded.model.named_modules():
        assert dict(vars(module)) == before[name]


def saved_bytes(block: nn.Module, call_args: tuple[tuple[object, ...], dict[str, object]], free: set[int]) -> int:
    """Bytes of the storages that autograd saves in a block's forward and that are not `free`."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        alive.append(tensor.detach())
        return tensor.detach()

    alive: list[torch.Tensor] = []
    args, kwargs = call_args
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(*args, **kwargs)
    del output
    return sum(count for storage, count in kept.items() if storage not in free)


@pytest.mark.parametrize(
    ("family", "dtype", "lora_rank"),
    [
        ("llama", "float32", 0),
        ("llama", "bfloat16", 2),
        ("qwen3", "float32", 0),
        ("gemma2", "float32", 0),
        ("gpt2", "float32", 0),
        ("gpt_neox", "float32", 2),
        ("smollm3", "float32", 0),
        ("mixtral", "bfloat16", 0),
    ],
)
def test_stored_bytes_are_what_autograd_saves(family: str, dtype: str, lora_rank: int) -> None:
    load = workload(f"builtin:tiny-{family}", dtype=dtype, lora_rank=lora_rank)
    loaded = build(load.source, dtype=load.dtype, lora_rank=lora_rank)
    step = ActorStep(loaded.model, load, vocab_size=loaded.vocab_size, device=CPU)
    blocks = [block for _, block in find_blocks(loaded.model)]
    calls = record_calls(blocks, lambda: step.loss(step.model, step.batches[0]))
    shared = shared_storages(calls)
    for found in find_classes(blocks, calls):
        block, call = blocks[found.first], calls[found.first]
        free = shared | {storage_of(tensor) for tensor in (*block.parameters(), *block.buffers())}
        measured = measure_ops(found.graph, block, call, repeats=1)
        expected = saved_bytes(block, call.rebuild(call.tensors), free)
        assert stored_bytes(found.record, measured.value_bytes) == expected


def test_checkpointing_does_not_rerun_the_last_matmul() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    step = ActorStep(loaded.model, workload(), vocab_size=loaded.vocab_size, device=CPU)
    blocks = [block for _, block in find_blocks(loaded.model)]
    calls = record_calls(blocks, lambda: step.loss(step.model, step.batches[0]))
    (found,) = find_classes(blocks, calls)
    names = [op.name for index, op in enumerate(found.record.ops) if index not in reran_ops(found.graph)]
    assert names == ["mlp.down_proj", "add.2"]


@pytest.mark.parametrize("prompt_tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("response_tokens", [2, 3, 50])
@pytest.mark.parametrize("token_points", [1, 3, 4])
def test_scaled_workloads_ascend_to_the_whole(prompt_tokens: int, response_tokens: int, token_points: int) -> None:
    load = workload(prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    scaled = scaled_workloads(load, token_points)
    tokens = [each.tokens for each in scaled]
    assert scaled[-1] == load
    assert tokens == sorted(set(tokens))
    assert len(tokens) <= token_points


def test_a_scale_out_of_bounds_is_bounded_with_a_warning() -> None:
    assert bounded(1.3) == 1.3
    with pytest.warns(NoisyMeasurementWarning, match="noisy"):
        assert bounded(0.1) == SANE_SCALE[0]
    with pytest.warns(NoisyMeasurementWarning, match="noisy"):
        assert bounded(-0.4) == 1.0
    with pytest.warns(NoisyMeasurementWarning, match="noisy"):
        assert bounded(50.0) == SANE_SCALE[1]


def test_bad_arguments() -> None:
    loaded = build("builtin:tiny-llama", dtype="float32")
    with pytest.raises(UsageError, match="token points"):
        profile_module(loaded.model, workload(), vocab_size=256, token_points=0)
    with pytest.raises(DeviceError, match="unknown device"):
        profile_module(loaded.model, workload(), vocab_size=256, device="abacus")


@noisy
def test_progress_ends_where_it_said() -> None:
    class Counter:
        total = done = 0
        finished = False

        def start(self, title: str, total: int) -> None:
            self.total = total

        def advance(self, detail: str = "") -> None:
            self.done += 1

        def finish(self) -> None:
            self.finished = True

    counter = Counter()
    loaded = build("builtin:tiny-llama", dtype="float32")
    profile_module(loaded.model, workload(), vocab_size=loaded.vocab_size, token_points=2, progress=counter)
    assert counter.finished
    assert counter.done == counter.total
