"""Full steps that are replayed give the states of steps that are launched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import reference
from layertap import LLM
from tiny_models import random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("caching", [False, True])
def test_replayed_steps(
    name: str,
    caching: bool,
    dtype: torch.dtype,
    tolerance: float,
    make_llm: Callable[..., LLM],
    tiny: Callable[..., str],
) -> None:
    path = tiny(name, dtype, **({} if dtype is torch.float32 else {"initializer_range": 0.05}))
    options = {
        "device": "cuda",
        "layers": ["norm", 0, 1, 2],
        "max_num_batched_tokens": 128,
        "max_num_seqs": 9,
        "block_size": 4,
        "max_model_len": 512,
        "enable_prefix_caching": caching,
    }
    # 128 tokens: exactly, filled up by two, as the middle of a prompt, and as a prompt's end with a new one.
    prompts = random_prompts(1, [64, 64, 126, 300, 84, 40, 31, 1])
    launched = make_llm(path, **options)
    launched._core.runner.recorded.clear()
    expected = list(launched.extract(prompts))
    replayed = make_llm(path, **options)
    recorded = replayed._core.runner.recorded
    # 64 of 128; a model of this size is launched more slowly than it computes
    assert [graph.num_tokens for graph in recorded.graphs] == [64, 128]
    assert recorded.launch_seconds > 0
    assert recorded.token_seconds > 0
    for _ in range(2):
        before = sum(graph.num_replays for graph in recorded.graphs)
        for want, got in zip(expected, replayed.extract(prompts), strict=True):
            for column in range(4):
                d = reference.difference(got.hidden_states[:, column], want.hidden_states[:, column])
                assert d < tolerance, f"column {column}: {d:.1e}"
        assert sum(graph.num_replays for graph in recorded.graphs) > before
    before = recorded.graphs[0].num_replays
    (record,) = replayed.extract([prompts[6]])  # alone, and less than half of a step
    assert recorded.graphs[0].num_replays > before
    assert reference.difference(record.hidden_states, expected[6].hidden_states) < tolerance
