"""A step that is looked at one step later holds nobody's states back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layertap import LLM, SamplingParams
from test_cases import random_prompt


def test_states_leave_before_the_next_step_is_waited_for(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(layers=[1, 3], max_num_batched_tokens=32)
    core = llm._core
    monkeypatch.setattr(core, "_may_lag", lambda output: True)  # as on a GPU
    finalize, handed_on = core._finalize, []

    def noted(step) -> None:  # type: ignore[no-untyped-def]
        assert core.connector is not None
        assert not core.connector._ended, "a step is waited for while states of an earlier one lie here"
        handed_on.append(len(core._launched))
        finalize(step)

    monkeypatch.setattr(core, "_finalize", noted)
    prompts = [random_prompt(32, seed) for seed in range(5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1] * 5
    assert 1 in handed_on, "no step was ahead"
