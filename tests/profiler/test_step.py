"""The actor update: equal heads, reproducible gradients, gradients kept or freed as asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hilore_plan.errors import UsageError
from hilore_plan.integrations.builtin_models import build
from hilore_plan.profiler.checkpointing import checkpointed
from hilore_plan.profiler.step import ActorStep, Enterable, MicroBatch, grpo_loss
from hilore_plan.schema.record import Workload

CPU = torch.device("cpu")


def workload(**changes: object) -> Workload:
    options: dict[str, object] = {
        "source": "builtin:tiny-llama", "dtype": "float32", "attention": "sdpa", "head": "fused",
        "batch": 2, "prompt_tokens": 5, "response_tokens": 7,
    }  # fmt: skip
    return Workload.model_validate({**options, **changes})


def actor(source: str = "builtin:tiny-llama", lora_rank: int = 0, **changes: object) -> ActorStep:
    load = workload(source=source, lora_rank=lora_rank, **changes)
    loaded = build(source, dtype=load.dtype, lora_rank=lora_rank)
    return ActorStep(loaded.model, load, vocab_size=loaded.vocab_size, device=CPU)


def gradients(step: ActorStep) -> list[torch.Tensor]:
    step.backward()
    return [p.grad for p in step.trainable if p.grad is not None]


@pytest.mark.parametrize("source", ["tiny-llama", "tiny-gemma2", "tiny-granite", "tiny-gpt2", "tiny-gpt_neox"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_fused_head_equals_full_head(source: str, lora_rank: int) -> None:
    fused, full = (actor(f"builtin:{source}", lora_rank, head=head) for head in ("fused", "full"))
    # Both compute in float32 with sums of a few hundred terms; see test_head.tolerance.
    close = 8 * 256 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(fused.backward(), full.backward(), rtol=close, atol=close)
    for mine, theirs in zip(fused.trainable, full.trainable, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=close, atol=close * float(theirs.grad.abs().max()))


def test_two_builds_give_bit_equal_gradients() -> None:
    for mine, theirs in zip(gradients(actor(dtype="bfloat16")), gradients(actor(dtype="bfloat16")), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("prompt_tokens", [0, 1, 5])
def test_every_response_token_counts_once(prompt_tokens: int) -> None:
    step = actor(prompt_tokens=prompt_tokens)
    batch = step.batches[0]
    assert batch.targets.shape == (2, 7 - (prompt_tokens == 0))
    assert batch.update_tokens == 2 * batch.targets.numel()


def test_advantages_have_both_signs() -> None:
    for batch in actor().batches:
        assert batch.advantages.min() < 0 < batch.advantages.max()


def test_coefficients_are_minus_advantage_over_tokens() -> None:
    batch = actor().batches[0]
    log_probs = torch.randn(batch.targets.shape, requires_grad=True)
    grpo_loss(log_probs, batch).backward()
    expected = (-batch.advantages[:, None] / batch.update_tokens).expand_as(log_probs)
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, expected)


@pytest.mark.parametrize("accumulation", [True, False])
def test_an_update_begins_without_gradients(accumulation: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step, begun = actor(accumulation=accumulation), []
    step.begin("live")
    plain = step.backward

    def backward(index: int, runtime: Enterable | None) -> torch.Tensor:
        begun.append(all(p.grad is None for p in step.trainable))
        return plain(index, runtime)

    monkeypatch.setattr(step, "backward", backward)
    step.step()
    assert begun == [True, not accumulation]
    assert all(p.grad is not None for p in step.trainable)


def test_a_micro_batch_begins_with_gradients_of_zeros_or_without_any() -> None:
    step = actor()
    step.begin("live")
    assert all(p.grad is not None and not p.grad.any() for p in step.trainable)
    step.begin("none")
    assert all(p.grad is None for p in step.trainable)


def test_live_bytes_are_the_sum_of_their_parts() -> None:
    step = actor()
    step.step()
    parts = step.parameter_bytes() + step.optimizer_bytes() + step.batch_bytes() + step.gradient_bytes()
    assert step.live_bytes() == parts
    assert step.optimizer_bytes() >= 2 * step.gradient_bytes()


def test_checkpointing_changes_no_bit_and_is_taken_off() -> None:
    plain, other = actor(dtype="bfloat16"), actor(dtype="bfloat16")
    blocks = list(other.model.model.layers)  # type: ignore[union-attr, arg-type]
    before = [dict(block.__dict__) for block in blocks]
    with checkpointed(blocks):
        got = gradients(other)
    assert before == [dict(block.__dict__) for block in blocks]
    for mine, theirs in zip(got, gradients(plain), strict=True):
        assert torch.equal(mine, theirs)


def test_a_plain_module_with_its_own_loss() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids) @ self.embedding.weight.t()

    def loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        return model(batch.ids).float().square().mean()

    model = Tiny()
    ActorStep(model, workload(), vocab_size=50, device=CPU, loss=loss).step()
    assert model.embedding.weight.grad is not None
    with pytest.raises(UsageError, match="causal language model"):
        ActorStep(model, workload(), vocab_size=50, device=CPU).step()


def test_a_frozen_model_is_refused() -> None:
    model = build("builtin:tiny-llama", dtype="float32").model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter"):
        ActorStep(model, workload(), vocab_size=256, device=CPU)
