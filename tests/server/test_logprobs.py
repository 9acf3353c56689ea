"""Log-probabilities of every value go into JSON."""

from __future__ import annotations

import json

import pytest

from layertap.outputs import Logprob
from layertap.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


@pytest.mark.parametrize(
    ("value", "written"), [(-1.5, -1.5), (float("-inf"), -9999.0), (float("nan"), -9999.0)]
)
def test_what_is_no_json_number_is_written_as_the_floor(value: float, written: float) -> None:
    rows = [{5: Logprob(value, 1, "a"), 6: Logprob(value, 2, "b")}]
    completion = completion_logprobs(rows, [5], ["a"], 0, False)
    assert completion["token_logprobs"] == [written]
    assert completion["top_logprobs"] == [{"a": written, "b": written}]
    chat = chat_logprobs(rows, [5], 2, False)
    (entry,) = chat["content"]
    assert {entry["logprob"], *(t["logprob"] for t in entry["top_logprobs"])} == {written}
    prompt = prompt_logprobs([None, *rows])
    assert prompt[1]["5"]["logprob"] == written
    json.dumps([completion, chat, prompt], allow_nan=False)
