"""Tiny models with random weights, one for each architecture that is tested by name, and prompts for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 160
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Larger than usual, so that attention and MLP change the stream by much and a fault shows.
    "initializer_range": 0.15,
}


def _config(name: str, **changes: Any) -> Callable[[], Any]:
    def build() -> Any:
        values = {k: v for k, v in {**_COMMON, **changes}.items() if v is not ...}
        return getattr(transformers, name)(**values)

    return build


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

PACKED: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=32),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=32, **_MOE),
    "mistral": _config("MistralConfig", sliding_window=12, head_dim=16),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=12,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig", head_dim=16, sliding_window=12, query_pre_attn_scalar=16, sliding_window_pattern=2
    ),
    "phi3": _config("Phi3Config", pad_token_id=0),
    "gpt2": _config(
        "GPT2Config",
        n_embd=64,
        n_layer=5,
        n_head=4,
        n_positions=1024,
        hidden_size=...,
        num_hidden_layers=...,
        num_attention_heads=...,
        num_key_value_heads=...,
        intermediate_size=...,
        max_position_embeddings=...,
    ),
    "gpt_neox": _config("GPTNeoXConfig", num_key_value_heads=...),
    "olmo2": _config("Olmo2Config"),
    "cohere2": _config("Cohere2Config", sliding_window=12, head_dim=16),
    "granite": _config(
        "GraniteConfig",
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "gpt_oss": _config(
        "GptOssConfig", head_dim=16, sliding_window=12, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": _config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}

ALONE: dict[str, Callable[[], Any]] = {
    "qwen3_next": _config(
        "Qwen3NextConfig",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=[
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
        ],
    ),
    "mamba2": _config(
        "Mamba2Config",
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=8,
        intermediate_size=...,
        num_attention_heads=...,
        num_key_value_heads=...,
        max_position_embeddings=...,
    ),
    "bamba": _config(
        "BambaConfig",
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=8,
        attn_layer_indices=[2],
        num_logits_to_keep=...,
    ),
}


def build(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a tiny model of this architecture into ``folder`` and return it."""
    config = {**PACKED, **ALONE}[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.dim() == 1 and (
                "norm" in parameter_name or "ln_" in parameter_name or "bias" in parameter_name
            ):
                p.add_(torch.randn_like(p) * 0.1)
            if "sinks" in parameter_name:
                p.copy_(torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompts(seed, [length])[0]
