"""On a Hopper GPU, layers whose norms are folded give the states that transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import reference
import tiny_models
from layertap import LLM
from tiny_models import random_prompts

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("budget", [64, 512])
def test_states_equal_transformers(
    name: str, budget: int, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """In steps of fewer tokens than the kernels take, and of more."""
    path = str(tiny_models.build(name, tmp_path, torch.bfloat16, initializer_range=0.05))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.weight.data += (torch.rand(module.weight.shape, generator=generator) - 0.5).bfloat16()
    model.save_pretrained(path)
    model = model.to("cuda").eval()
    llm = make_llm(
        path,
        device="cuda",
        layers=[0, 1, 2, 4],
        max_num_batched_tokens=budget,
        max_model_len=512,
        skip_tokenizer_init=True,
    )
    folded = sum("norm_eps" in vars(module) for module in llm._core.verifier.layers.modules())
    assert folded == len(model.get_decoder().layers) * (1 if name == "qwen2" else 4)
    prompts = random_prompts(1, [300, 40, 3, 211, 170])
    for prompt, record in zip(prompts, llm.extract(prompts), strict=True):
        with torch.inference_mode():
            states = model.get_decoder()(
                torch.tensor([prompt], device="cuda"), use_cache=False, output_hidden_states=True
            ).hidden_states
        for column, layer in enumerate([0, 1, 2, 4]):
            got = record.hidden_states[:, column]
            assert reference.difference(got, states[layer][0].cpu()) < 2e-2, f"layer {layer}"
