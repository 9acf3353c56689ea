"""Every architecture's states equal transformers', at each boundary, however the engine cuts and shares the
work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import reference
import tiny_models
from layertap import LLM
from tiny_models import random_prompts

TOLERANCE = 1e-5


def check(llm: LLM, path: str, prompts: list[list[int]]) -> None:
    for prompt, got in zip(prompts, llm.extract(prompts), strict=True):
        assert got.token_ids.tolist() == prompt
        reference.assert_states(got.hidden_states, reference.states(path, prompt), TOLERANCE)


@pytest.mark.parametrize("name", tiny_models.PACKED)
def test_packed_architectures_equal_transformers_in_chunks_batches_and_prefix_hits(
    name: str, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    path = tiny(name)
    llm = make_llm(
        path,
        layers=["all", "norm"],
        max_num_batched_tokens=24,
        block_size=4,
        max_num_seqs=5,
        max_model_len=256,
    )
    assert llm._core.verifier.packed, llm._core.verifier.why_not_packed
    prompts = random_prompts(1, [40, 3, 17, 1, 70])
    prompts.append(prompts[0][:30] + prompts[2])  # a prefix of another one, cut inside a block
    check(llm, path, prompts)
    check(llm, path, prompts[::-1])  # now from the prefix cache
    assert llm.stats()["prefix_cache_hits"] > 100


@pytest.mark.parametrize("name", tiny_models.ALONE)
def test_recurrent_and_hybrid_architectures_equal_transformers_sequence_by_sequence(
    name: str, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    path = tiny(name)
    llm = make_llm(path, layers=["all", "norm"], max_num_batched_tokens=24, block_size=4, max_model_len=256)
    assert not llm._core.verifier.packed
    check(llm, path, random_prompts(2, [40, 3, 17, 1]))


@pytest.mark.parametrize("name", [*tiny_models.PACKED, *tiny_models.ALONE])
def test_greedy_text_and_output_states_equal_transformers(
    name: str, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    path = tiny(name)
    llm = make_llm(path, layers=["all", "norm"], block_size=4, max_model_len=256)
    model = reference.load(path)
    prompts = random_prompts(3, [9, 21])
    got = list(llm.extract(prompts, max_tokens=12, include_output_tokens=True))
    for prompt, states in zip(prompts, got, strict=True):
        with torch.inference_mode():
            whole = list(prompt)
            for _ in range(12):
                logits = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, -1]
                whole.append(int(logits.argmax()))
                if whole[-1] in llm._core.eos_token_ids:
                    break
        assert states.token_ids.tolist() == whole[:-1]
        # A recurrent layer's step is another formula than its chunked prefill: more rounding, no
        # more than that.
        tolerance = TOLERANCE if name in tiny_models.PACKED else 1e-4
        reference.assert_states(states.hidden_states, reference.states(path, whole[:-1]), tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mamba2", "qwen3_moe", "bamba"])
@pytest.mark.parametrize("layer", [0, 2, 5])
def test_extract_only_runs_no_layer_above_the_highest_tapped_one(
    name: str, layer: int, make_llm: Callable[..., LLM], tiny: Callable[..., str]
) -> None:
    path = tiny(name)
    llm = make_llm(path, layers=[layer], extract_only=True)
    assert len(llm._core.verifier.layers) == max(layer, 1)
    prompts = random_prompts(4, [12, 30])
    for prompt, got in zip(prompts, llm.extract(prompts), strict=True):
        right = reference.states(path, prompt)[:, layer : layer + 1]
        reference.assert_states(got.hidden_states, right, TOLERANCE)
