"""The two engines agree at each boundary, and both with ``transformers``."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import reference
from layertap import LLM, UnsupportedModelError
from tiny_models import VOCAB
from vllm_engine.support import SHAPES

pytestmark = pytest.mark.vllm
LENGTHS = (3, 40, 129, 200)


@pytest.mark.parametrize(
    ("model", "dtype", "tolerance"),
    [
        ("llama", "float32", 1e-4),
        ("llama", "bfloat16", 2e-2),
        ("qwen3", "float32", 1e-4),
        ("qwen3_moe", "float32", 1e-4),
        ("mistral", "float32", 1e-4),
        ("gpt_oss", "float32", 1e-4),
    ],
)
def test_engines_agree_at_every_boundary(
    start: Callable[..., LLM], tiny: Callable[..., str], model: str, dtype: str, tolerance: float
) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(10, VOCAB) for _ in range(n)] for n in LENGTHS]
    # The usual spread: with a larger one, rounding alone takes two right results further apart than that.
    changes = {"initializer_range": 0.02} if dtype == "bfloat16" else {}
    theirs = list(start(model, changes, layers="all", dtype=dtype).extract(prompts))
    path = tiny(model, **SHAPES[model], **changes)
    options = {"dtype": dtype, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 32 << 20}
    with LLM(path, layers="all", device="cpu", **options) as torch_llm:
        ours = list(torch_llm.extract(prompts))
    for a, b, ids in zip(ours, theirs, prompts, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() == ids
        reference.assert_states(b.hidden_states, a.hidden_states, tolerance)
        if dtype == "float32":
            right = reference.states(path, ids)[:, :-1]
            reference.assert_states(b.hidden_states, right.to(torch.float32), tolerance)


def test_a_model_class_that_vllm_takes_no_states_from_is_refused(start: Callable[..., LLM]) -> None:
    with pytest.raises(UnsupportedModelError, match="use engine='torch'"):
        start("gemma3", layers=[1])
