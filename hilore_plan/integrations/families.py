"""Small random models of the families that hilore is tested on, and the mid-sized one that it is timed on.

Sizes are such that a step takes milliseconds, but every trait that changes a block graph is there: grouped key-value
heads, sliding windows shorter than a test sequence, layers without rotary embedding, experts, logit caps, dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hilore_plan.integrations.extras import quiet_transformers, require

VOCABULARY = 256
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_WINDOW = 8
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_hidden_layers": 2, "num_experts_per_tok": 2}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GEMMA: dict[str, Any] = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": _WINDOW,
}

# family -> (model type of transformers, what differs from that type's defaults)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 16}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": _WINDOW}),
    "gemma2": ("gemma2", {**_GEMMA, "final_logit_softcapping": 30.0}),
    "gemma3": (
        "gemma3_text",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("phi3", _GROUPED),
    "olmo2": ("olmo2", _GROUPED),
    "gpt_neox": ("gpt_neox", _SIZES),
    "gpt2": ("gpt2", {**_GPT2, **_NO_DROPOUT}),
    "gpt2-dropout": ("gpt2", {**_GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "smollm3": ("smollm3", {**_GROUPED, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            **_GROUPED,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
    "mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 4, "sliding_window": None}),
}

# transformers 5.24 gives Gemma 2 no sdpa, since that has no cap on attention logits.
_EAGER_ONLY = frozenset({"gemma2"})

QWEN2_MINI: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2560,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 4096,
}


def build_family(family: str, *, dtype: torch.dtype, attention: str, seed: int, **overrides: object) -> nn.Module:
    """A random model of `family` (a key of `FAMILIES`); `overrides` go into its config.

    A family that has no sdpa gets eager attention, whatever `attention` says.
    """
    model_type, settings = FAMILIES[family]
    merged = {"vocab_size": VOCABULARY, **settings, **overrides}
    return _from_config(model_type, merged, dtype, "eager" if family in _EAGER_ONLY else attention, seed)


def build_qwen2_mini(*, dtype: torch.dtype, attention: str, seed: int) -> nn.Module:
    """A random Qwen2 with 10 blocks: large enough to time, small enough for two CPU cores."""
    return _from_config("qwen2", QWEN2_MINI, dtype, attention, seed)


def _from_config(model_type: str, settings: dict[str, Any], dtype: torch.dtype, attention: str, seed: int) -> nn.Module:
    transformers = require("transformers", f"a {model_type} model")
    config = transformers.AutoConfig.for_model(model_type, **{**_IDS, **settings})
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not `.to(dtype)` afterwards: that would also round the rotary frequencies, which real models keep in fp32.
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model
