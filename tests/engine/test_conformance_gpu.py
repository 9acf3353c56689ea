"""On a GPU, every architecture's states equal transformers', chunked, batched, prefix-cached and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers

import reference
import tiny_models
from layertap import LLM
from tiny_models import random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


@lru_cache(maxsize=2)
def load(path: str, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.to("cuda").eval()


@torch.inference_mode()
def plain(path: str, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """[T, N, H]: boundaries 0 to N - 1, by the model's own forward on the GPU."""
    out = load(path, dtype).get_decoder()(
        input_ids=torch.tensor([prompt], device="cuda"), use_cache=False, output_hidden_states=True
    )
    return torch.stack(out.hidden_states[:-1], dim=2)[0].cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", tiny_models.PACKED)
def test_architectures_equal_transformers_on_a_gpu(
    name: str, dtype: torch.dtype, tolerance: float, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    # Weights of usual size for bfloat16: larger ones amplify its rounding from layer to layer.
    path = tiny(name, dtype, **({} if dtype is torch.float32 else {"initializer_range": 0.05}))
    layers = tiny_models.PACKED[name]().num_hidden_layers
    llm = make_llm(
        path,
        device="cuda",
        layers=list(range(layers)),
        max_num_batched_tokens=24,
        block_size=4,
        max_num_seqs=5,
        max_model_len=256,
        enforce_eager=name not in ("llama", "gemma3"),
    )
    prompts = random_prompts(1, [40, 3, 17, 1, 70])
    prompts.append(prompts[0][:30] + prompts[2])
    for order in (prompts, prompts[::-1]):
        for prompt, got in zip(order, llm.extract(order), strict=True):
            right = plain(path, prompt, dtype)
            for k in range(layers):
                ours, theirs = got.hidden_states[:, k], right[:, k]
                if dtype is torch.bfloat16 and name in EXPERTS:
                    # Rounding may send a single token to another expert; most tokens must go the same way.
                    per_token = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1)
                    d = float(per_token.median())
                else:
                    d = reference.difference(ours, theirs)
                assert d < tolerance, f"boundary {k}: {d:.1e}"
    assert llm.stats()["prefix_cache_hits"] > 100
