"""What ``LLM.extract`` tells of wrong prompts, and when."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from layertap import LLM, ExtractionError, InvalidInputError, SamplingParams, checked_ahead
from layertap.prompts import PromptTokenizer, TokenizedPrompt

RIGHT = [1, 2, 3]
LONG = [5] * 513  # max_model_len is 512


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(layers=[0, 2])


SHOWN_AT_A_LOOK = [
    (17, r"^prompts\[2\]: got 17; allowed: a string"),
    (b"bytes", r"^prompts\[2\]: got b'bytes'"),
    ([], r"^prompts\[2\]: got \[\]; allowed: at least one token id"),
    ({"prompt_token_ids": []}, r"^prompts\[2\]\.prompt_token_ids: got \[\]"),
    (
        {"prompt_token_ids": "ids"},
        r"^prompts\[2\]\.prompt_token_ids: got 'ids'; allowed: a list of token ids",
    ),
    ({"text": "a"}, r"^prompts\[2\]: got \{'text': 'a'\}; allowed: an object with one of"),
    ({"prompt": 3}, r"^prompts\[2\]\.prompt: got 3; allowed: a string"),
    ("a text", r"^prompts\[2\]: got 'a text'; allowed: token ids: there is no tokenizer"),
    (LONG, r"^prompts\[2\]: got '513 tokens'; allowed: at most 512 tokens"),
    (np.array(LONG), r"^prompts\[2\]: got '513 tokens'"),
    ({"prompt_token_ids": torch.tensor(LONG)}, r"^prompts\[2\]: got '513 tokens'"),
    (TokenizedPrompt.of(None, LONG), r"^prompts\[2\]: got '513 tokens'"),
]


@pytest.mark.parametrize(("wrong", "told"), SHOWN_AT_A_LOOK)
@pytest.mark.parametrize("kind", [list, tuple])
def test_what_shows_at_a_look_is_told_by_the_call_itself(
    wrong: Any, told: str, kind: type[Any], llm: LLM
) -> None:
    with pytest.raises(InvalidInputError, match=told):
        llm.extract(kind([RIGHT, RIGHT, wrong]))
    assert llm.stats()["num_steps"] == 0


def test_positions_and_output_that_a_prompt_has_no_room_for_are_told_by_the_call(llm: LLM) -> None:
    prompts = [RIGHT, [1, 2, 3, 4], [1]]
    told = re.escape("prompts[2], tokens: got 2; allowed: positions from -1 to 0")
    with pytest.raises(InvalidInputError, match=f"^{told}"):
        llm.extract(prompts, tokens=[2])
    with pytest.raises(InvalidInputError, match=r"^prompts\[1\], max_tokens: got 8; allowed: at most 0"):
        llm.extract([RIGHT, [1] * 512], sampling_params=SamplingParams(max_tokens=8))
    assert llm.stats()["num_steps"] == 0


def test_one_prompt_is_checked_by_the_call_too(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="513 tokens"):
        llm.extract(LONG)


def lazily(prompts: list[Any]) -> Iterator[Any]:
    yield from prompts


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *SHOWN_AT_A_LOOK,
        ([1, 10**6], r"^prompts\[2\]\[1\]: got 1000000; allowed: token ids from 0"),
        ([1, "2"], r"^prompts\[2\]\[1\]: got '2'; allowed: an integer token id"),
    ],
)
def test_an_iterators_prompts_are_told_of_when_their_turn_comes(wrong: Any, told: str, llm: LLM) -> None:
    iterator = llm.extract(lazily([RIGHT, RIGHT, wrong, RIGHT]))
    assert [next(iterator).token_ids.tolist() for _ in range(2)] == [RIGHT, RIGHT]
    with pytest.raises(InvalidInputError, match=told) as refused:
        next(iterator)
    shown = "".join(traceback.format_exception(refused.value))
    assert "The states of all prompts before it (2) have been yielded." in shown


def test_ids_beyond_the_vocabulary_are_not_looked_for_ahead(llm: LLM) -> None:
    iterator = llm.extract([RIGHT, [10**6]])
    assert next(iterator).token_ids.tolist() == RIGHT
    with pytest.raises(InvalidInputError, match=r"^prompts\[1\]\[0\]: got 1000000"):
        next(iterator)


def test_a_first_prompt_that_is_wrong_has_none_before_it(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match=r"^prompts\[0\]: got '513 tokens'") as refused:
        next(llm.extract(lazily([LONG, RIGHT])))
    assert not hasattr(refused.value, "__notes__")


def test_nothing_is_computed_for_prompts_after_one_that_ends_the_iteration(llm: LLM) -> None:
    taken: list[Any] = []

    def prompts() -> Iterator[Any]:
        for prompt in (RIGHT, LONG, RIGHT):
            taken.append(prompt)
            yield prompt

    iterator = llm.extract(prompts())
    next(iterator)
    with pytest.raises(InvalidInputError, match=r"^prompts\[1\]"):
        next(iterator)
    assert taken == [RIGHT, LONG]


def test_errors_that_are_to_be_returned_come_in_their_place(llm: LLM) -> None:
    got = list(llm.extract([RIGHT, LONG, RIGHT, 17], on_error="return"))
    assert [isinstance(g, ExtractionError) for g in got] == [False, True, False, True]
    assert "prompts[1]: got '513 tokens'" in str(got[1])
    assert "prompts[3]: got 17" in str(got[3])


def test_a_list_that_is_too_long_is_not_gone_through(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_ahead, "MOST_PROMPTS", 2)
    iterator = llm.extract([RIGHT, RIGHT, LONG])
    assert next(iterator).token_ids.tolist() == RIGHT
    iterator.close()
    with pytest.raises(InvalidInputError, match="513 tokens"):
        llm.extract([RIGHT, LONG])


def test_texts_are_not_tokenized_ahead() -> None:
    def tokenizer(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("tokenized")

    look_at = PromptTokenizer(tokenizer).look_at
    assert look_at("a text") is None
    assert look_at({"prompt": "a text"}) is None
    assert look_at([{"role": "user", "content": "hi"}]) is None
    assert look_at([1, "what it holds is seen later"]) == 2
    with pytest.raises(InvalidInputError, match=r"^prompt\.messages\[0\]: got 'hi'; allowed: an object with"):
        look_at({"messages": ["hi"]})
