"""Prompts are computed while later ones of the call are checked; of a call that is wrong nothing is seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap import LLM, InvalidInputError, SamplingParams, reader
from layertap.engine.core import EngineCore
from layertap.engine.hold import Hold
from layertap.prompts import PromptTokenizer
from small_jobs import all_blocks_free, file_config, published, wait_until

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
PROMPTS = [[i, i + 1, i + 2, i + 3] for i in range(3, 23)]


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, from eight tokens on; with steps that are looked at when the next one is launched, too."""
    monkeypatch.setattr(LLM, "_computed_while_checking", lambda self: 8)
    monkeypatch.setattr("layertap.checked_submission.LAST", 4)
    if request.param:
        monkeypatch.setattr(EngineCore, "_may_lag", lambda self, output: True)


@pytest.fixture
def llm(make_llm: Callable[..., LLM], tiny: Callable[..., str], tmp_path: Path) -> LLM:
    """With files, in steps of eight tokens."""
    config = file_config(tmp_path)
    return make_llm(tiny("llama"), layers=[1], kv_transfer_config=config, max_num_batched_tokens=8)


def slow_check(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have one prompt's check take until steps have run, and a while longer. Gives the number of steps and of
    outputs at its end."""
    seen: list[tuple[int, int]] = []
    finished: list[Any] = []
    finish, ids = EngineCore._finish, PromptTokenizer.ids

    def note(self: EngineCore, request: Any) -> None:
        finished.append(request)
        finish(self, request)

    def slowly(prompt: Any, field: str, text: str | None = None) -> Any:
        if field == f"prompts[{number}]":
            wait_until(lambda: llm._core.num_steps > 0)
            time.sleep(0.1)
            seen.append((llm._core.num_steps, len(finished)))
        return ids(prompt, field, text)

    monkeypatch.setattr(EngineCore, "_finish", note)
    monkeypatch.setattr(PromptTokenizer, "ids", staticmethod(slowly))
    return seen


def test_outputs_are_those_of_a_call_that_is_checked_before(
    make_llm: Callable[..., LLM],
    tiny: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: None,
) -> None:
    options = {"layers": [1], "max_num_batched_tokens": 8}
    expected = list(make_llm(tiny("llama"), **options).extract(PROMPTS))
    llm = make_llm(tiny("llama"), kv_transfer_config=file_config(tmp_path), **options)
    seen = slow_check(llm, 15, monkeypatch)
    outputs = llm.generate(PROMPTS, PARAMS)
    ((steps, finished),) = seen
    assert 1 <= steps <= 2, "steps ran, and no more than lie ahead"
    assert finished == 0, "before all was checked"
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    for output, record in zip(outputs, expected, strict=True):
        path = (output.kv_transfer_params or {})["hidden_states_path"]
        torch.testing.assert_close(
            reader.open(path).hidden_states, record.hidden_states, rtol=1e-4, atol=1e-5
        )
    llm.stats()
    assert not llm._core._holds


@pytest.mark.parametrize("wrong", [[1, "two"], [], [10**9]])
def test_nothing_of_a_wrong_call_is_seen(
    wrong: Any,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: None,
) -> None:
    seen = slow_check(llm, 20, monkeypatch)
    with pytest.raises(InvalidInputError, match=r"prompts\[20\]|prompt"):
        llm.generate([*PROMPTS, wrong], PARAMS)
    assert seen
    assert seen[0][0] > 0, "some had been computed"
    assert llm.stats()["num_running"] == 0
    wait_until(lambda: all_blocks_free(llm))
    assert published(tmp_path) == []
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)
    assert len(published(tmp_path)) == len(PROMPTS)


def test_other_calls_go_on_afterwards(
    make_llm: Callable[..., LLM], tiny: Callable[..., str], at_once: None
) -> None:
    llm = make_llm(tiny("llama"), layers=[1], max_num_batched_tokens=8)
    for _ in range(3):
        assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)
        with pytest.raises(InvalidInputError):
            llm.generate([*PROMPTS, [-1]], PARAMS)
    assert len(list(llm.extract(PROMPTS))) == len(PROMPTS)
    assert not llm._core._holds


def test_of_the_last_prompts_the_longest_go_first(
    make_llm: Callable[..., LLM],
    tiny: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    at_once: None,
) -> None:
    order: list[int] = []
    add_request = EngineCore.add_request

    def note(self: EngineCore, request: Any) -> None:
        order.append(request.num_tokens)
        add_request(self, request)

    monkeypatch.setattr(EngineCore, "add_request", note)
    llm = make_llm(tiny("llama"), layers=[1], max_num_batched_tokens=8)
    prompts = [[3] * n for n in (5, 9, 4, 2, 6, 3, 8, 1)]
    outputs = llm.generate(prompts, PARAMS)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert order == [5, 9, 4, 2, 8, 6, 3, 1]
    order.clear()
    llm.generate(prompts[-3:], PARAMS)
    assert order == [3, 8, 1], "of a short call all are computed as they come"


@pytest.mark.parametrize("moment", ["cancelled", "owner gone"])
def test_a_call_that_is_interrupted_leaves_nothing(
    moment: str,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: None,
) -> None:
    """Also where a second interrupt comes before its requests are aborted, or the first one says so."""
    seen = slow_check(llm, 15, monkeypatch)
    collector = LLM._collector

    def interrupted(self: LLM, name: str, prompt: Any, *rest: Any) -> Any:
        if prompt.token_ids == PROMPTS[17]:
            raise KeyboardInterrupt
        return collector(self, name, prompt, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_collector", interrupted)
        patch.setattr(LLM, "_abort", lambda self, collectors: None)
        if moment == "owner gone":
            patch.setattr(Hold, "cancelled", property(lambda self: False, lambda self, value: None))
        try:
            llm.generate(PROMPTS, PARAMS)
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("not interrupted")
        assert seen
        wait_until(lambda: not llm._core.requests)
    wait_until(lambda: all_blocks_free(llm))
    assert published(tmp_path) == []
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_a_wrong_call_does_not_end_another_ones_request_of_the_same_id(
    make_llm: Callable[..., LLM], tiny: Callable[..., str], at_once: None
) -> None:
    llm = make_llm(tiny("llama"), layers=[1], max_num_batched_tokens=8)
    outputs: list[Any] = []
    long = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True, detokenize=False)
    thread = threading.Thread(
        target=lambda: outputs.extend(llm.generate([[3, 4, 5]], long, request_ids=["x"], on_error="return"))
    )
    thread.start()
    wait_until(lambda: "x" in llm._core.requests)
    with pytest.raises(InvalidInputError):
        llm.generate([*PROMPTS, [-1]], PARAMS, request_ids=["x", *(f"q{i}" for i in range(20))])
    thread.join(60)
    assert outputs[0].error is None
    assert len(outputs[0].outputs[0].token_ids) == 80
