"""Layers compiled on a CPU: the same states and tokens, from one graph for all layers and sizes."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

import reference
from layertap import LLM, SamplingParams
from layertap.engine.compile import _record
from layertap.engine.runner import ModelRunner
from tiny_models import random_prompts


@pytest.mark.slow
def test_compiled_layers_equal_plain_ones(make_llm: Callable[..., LLM], tiny: Callable[..., str]) -> None:
    path = tiny("llama")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    llm = make_llm(path, layers=["all", "norm"], enforce_eager=False, max_num_batched_tokens=24, block_size=4)
    if not llm._core.compiled:
        pytest.skip("needs a C++ compiler")
    prompts = random_prompts(1, [40, 3, 17, 1])
    for prompt, got in zip(prompts, llm.extract(prompts), strict=True):
        reference.assert_states(got.hidden_states, reference.states(path, prompt), 1e-5)
    # A single token a step, which is filled up.
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    plain = make_llm(path, layers=[1])
    (expected,), (got,) = plain.generate(prompts[0], params), llm.generate(prompts[0], params)
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class CompilerError(Exception):
    """As Triton's."""


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, CompilerError])
def test_what_cannot_be_compiled_runs_uncompiled(
    error: type[Exception],
    make_llm: Callable[..., LLM],
    tiny: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tiny("llama")
    monkeypatch.setattr(ModelRunner, "warm_up", Mock(side_effect=error("no such instruction")))
    llm = make_llm(path, layers=[1, 2], enforce_eager=False)
    assert not llm._core.compiled
    assert "layers run uncompiled: " + error.__name__ in caplog.text
    (prompt,) = random_prompts(2, [9])
    (got,) = llm.extract([prompt])
    reference.assert_states(got.hidden_states, reference.states(path, prompt)[:, 1:3], 1e-5)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_what_cannot_be_recorded_is_launched(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """An attention outside a compiled layer (where it was compiled too often, say) finds no layout."""
    _record(Mock(record=Mock(side_effect=error), recorded=Mock(graphs=[])), 64)
    assert "launched kernel by kernel" in caplog.text
