"""Token ids in every form that users have them in; what is none is named."""

from __future__ import annotations

import enum
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from layertap import InvalidInputError
from layertap.prompts import PromptTokenizer, TokenizedPrompt, as_list, is_single

IDS = [7, 0, 1, 31_999]
tokenize = PromptTokenizer(None)


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        np.array(IDS, dtype=np.uint16),
        list(np.array(IDS)),
        torch.tensor(IDS),
        list(torch.tensor(IDS)),
        [7, 0, *np.array([1, 31_999])],
        [7, 0, *torch.tensor([1, 31_999])],
        [7, enum.IntEnum("Token", {"A": 0}).A, 1, 31_999],
        {"prompt_token_ids": np.array(IDS)},
    ],
)
def test_any_integers_become_a_list_of_ints_and_an_array(given: Any) -> None:
    prompt = tokenize(given)
    assert prompt.token_ids == prompt.array.tolist() == IDS
    assert {type(t) for t in prompt.token_ids} == {int}
    assert prompt.array.dtype == np.int64
    assert prompt.token_ids is not given


class Column(list[Any]):
    """A table's, as pandas has it."""

    ndim = 1


@pytest.mark.parametrize(
    "one",
    [IDS, np.array(IDS), list(np.array(IDS)), torch.tensor(IDS), "text", [{"role": "user"}], Column(IDS)],
)
def test_one_prompt_is_told_from_several(one: Any) -> None:
    assert is_single(one)
    assert as_list(one) == [one] or as_list(one)[0] is one
    assert not is_single([one, one])


@pytest.mark.parametrize(
    "several",
    [
        np.array([IDS, IDS]),
        torch.tensor([IDS, IDS]),
        np.array(["one", "two"]),
        np.array([[5, 6], [7]], dtype=object),
        Column(["one", "two"]),
        Column([[5, 6], [7]]),
        Column([[{"role": "user"}], [{"role": "user"}]]),
        ["one", "two"],
        (p for p in ("one", "two")),
    ],
)
def test_several_prompts_are_told_from_one(several: Any) -> None:
    assert not is_single(several)
    assert len(as_list(several)) == 2


@pytest.mark.parametrize("none", [5, None, np.array(5), torch.tensor(5), [], np.array([]), iter([])])
def test_what_is_no_prompt_is_refused(none: Any) -> None:
    with pytest.raises(InvalidInputError, match="prompts: got"):
        as_list(none)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([5, True], "prompt[1]: got True"),
        ([False], "prompt[0]: got False"),
        ([1, 0, True, 2.0], "prompt[2]: got True"),  # the first of two
        ([5, 1.0], "prompt[1]: got 1.0"),
        ([5, None, 6], "prompt[1]: got None"),
        ([5, "6"], "prompt[1]: got '6'"),
        ([5, [6]], "prompt[1]: got [6]"),
        ([10**30, 5.5], "prompt[1]: got 5.5"),
        (np.array([0.5]), "prompt[0]: got 0.5"),
        ([np.bool_(True)], "prompt[0]: got "),
        ([1, torch.tensor(True)], "prompt[1]: got tensor(True)"),
        ([1, torch.tensor(1.5)], "prompt[1]: got tensor(1.5"),
        ([3, np.array([5, 6])], "prompt[1]: got array([5, 6])"),
        ([3, torch.tensor([5, 6])], "prompt[1]: got tensor([5, 6])"),
        ([], "prompt: got []"),
        (torch.zeros(0, dtype=torch.int64), "prompt: got []"),
        (b"ab", "prompt: got b'ab'"),
        (range(0), "prompt: got []"),
        (5, "prompt: got 5"),
    ],
)
def test_what_is_no_integer_is_named(given: Any, named: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(named)):
        tokenize(given)


@pytest.mark.parametrize("wrong", [-1, 100, 2**63, -(10**30)])
def test_what_the_vocabulary_does_not_have_is_named(wrong: int) -> None:
    for given in ([99, 0, wrong, -5], [np.int64(99), 0, wrong, -5]):
        prompt = tokenize(given, "tokens")
        assert prompt.token_ids[2] == wrong
        there = pickle.loads(pickle.dumps(prompt))  # of a replica
        for checked in (prompt, there):
            with pytest.raises(
                InvalidInputError, match=re.escape(f"tokens[2]: got {wrong}; allowed: token ids from 0 to 99")
            ):
                checked.check_vocabulary(100)


def test_an_integer_that_cannot_be_written_down_is_refused_all_the_same() -> None:
    with pytest.raises(InvalidInputError, match="something of type int that cannot be shown"):
        tokenize([10**5000]).check_vocabulary(100)


def test_changing_the_list_afterwards_changes_nothing() -> None:
    given = [5, 6]
    prompt = tokenize(given)
    given.append(7)
    assert prompt.token_ids == prompt.array.tolist() == [5, 6]


def test_a_prompt_survives_its_way_to_another_process() -> None:
    prompt = TokenizedPrompt.of("a text", IDS)
    again = pickle.loads(pickle.dumps(prompt))
    assert again == prompt
    assert again.array.tolist() == IDS
    nothing = TokenizedPrompt.of(None, [])
    assert pickle.loads(pickle.dumps(nothing)) == nothing
    assert nothing.array.shape == (0,)
    nothing.check_vocabulary(1)


class Letters:
    """A tokenizer of a token a letter, which counts its calls."""

    calls = 0

    def __call__(self, given: str | list[str]) -> dict[str, Any]:
        self.calls += 1
        if isinstance(given, str):
            return {"input_ids": [ord(c) for c in given]}
        return {"input_ids": [[ord(c) for c in text] for text in given]}


def test_long_lists_of_texts_are_tokenized_in_one_call() -> None:
    letters = Letters()

    def several(prompts: list[Any]) -> list[TokenizedPrompt]:
        return list(PromptTokenizer(letters).several(prompts))

    texts = ["a" * 60_000, "b" * 60_000, "c"]
    together = several(texts)
    assert letters.calls == 1
    assert together == [PromptTokenizer(letters)(text) for text in texts]
    letters.calls = 0
    assert several(texts[1:]) == together[1:]
    assert several([*texts, [5, 6]])[3].token_ids == [5, 6]
    assert letters.calls == 2 + 3


@pytest.mark.parametrize("length", [1, 200_000])
@pytest.mark.parametrize(("wrong", "allowed"), [("", "at least one token"), ("\ud800", "valid Unicode")])
def test_a_wrong_text_among_several_is_named_by_its_place(length: int, wrong: str, allowed: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"prompts\[1\].*{allowed}"):
        list(PromptTokenizer(Letters()).several(["a" * length, wrong]))
