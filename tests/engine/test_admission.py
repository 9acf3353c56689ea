"""At the engine's door every token id is looked at once; whatever its value, the first wrong one is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

from layertap import InvalidInputError, SamplingParams
from layertap.config import EngineConfig
from layertap.engine.admission import Admission
from layertap.prompts import TokenizedPrompt

VOCAB = 1000
GREEDY = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture
def admission() -> Admission:
    return Admission(
        EngineConfig.from_kwargs("model", {}),
        vocab_size=VOCAB,
        max_model_len=64,
        has_tokenizer=False,
        eos_token_ids=frozenset(),
        served=None,
        connector=None,
    )


def test_the_lowest_and_the_highest_id_pass_and_lie_in_an_array(admission: Admission) -> None:
    ids = [VOCAB - 1, 0, 5, 5]
    request = admission.make_request("a", TokenizedPrompt.of(None, ids), GREEDY)
    assert request.prompt_token_ids == ids
    tokens = request.token_array(0, 4)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == ids
    request.output_token_ids = [7, 8, 9]
    assert request.token_array(1, 6).tolist() == [0, 5, 5, 7, 8]
    assert request.token_array(5, 7).tolist() == [8, 9]


@pytest.mark.parametrize(
    "wrong", [-1, VOCAB, 2**31, -(2**31), 2**32 + 5, 2**63 - 1, -(2**63), 2**63, 2**64 + 5, -(10**30)]
)
def test_an_id_outside_the_vocabulary_is_named_wherever_it_is(admission: Admission, wrong: int) -> None:
    for place in (0, 3):
        ids = [1, 2, 3, 4]
        ids[place] = wrong
        with pytest.raises(InvalidInputError, match=re.escape(f"prompt_token_ids[{place}]: got {wrong}")):
            admission.make_request("a", TokenizedPrompt.of(None, ids), GREEDY)


def test_the_first_of_several_wrong_ids_is_named(admission: Admission) -> None:
    with pytest.raises(InvalidInputError, match=re.escape("prompt_token_ids[1]: got -2")):
        admission.make_request("a", TokenizedPrompt.of(None, [1, -2, 10**30, VOCAB]), GREEDY)


def test_empty_and_long_prompts_are_refused(admission: Admission) -> None:
    with pytest.raises(InvalidInputError, match="at least one token"):
        admission.make_request("a", TokenizedPrompt.of(None, []), GREEDY)
    assert admission.make_request("a", TokenizedPrompt.of(None, [1] * 64), GREEDY).num_prompt_tokens == 64
    with pytest.raises(InvalidInputError, match="at most 64 tokens"):
        admission.make_request("a", TokenizedPrompt.of(None, [1] * 65), GREEDY)
