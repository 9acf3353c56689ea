"""What a step's tokens mean for its requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from layertap import LLM, SamplingParams
from layertap.engine.request import Request, RequestStatus
from layertap.prompts import TokenizedPrompt


def test_a_request_that_ends_may_abort_another_of_its_step(make_llm: Callable[..., LLM]) -> None:
    """Requests leave in order, each before the next one's token is looked at."""
    llm = make_llm(layers=None)
    core, greedy = llm._core, SamplingParams(max_tokens=1, temperature=0)
    prompt = TokenizedPrompt.of(None, [1, 2, 3])
    first, second, third = (core.make_request(name, prompt, greedy) for name in ("a", "b", "c"))
    ended: list[str] = []

    def note(request: Request, finished: bool) -> None:
        ended.append(request.request_id)
        if request is first:
            core.abort("b")

    def add() -> None:
        for request in (first, second, third):
            request.on_output = note
            core.add_request(request)

    llm._loop.call(add)
    deadline = time.monotonic() + 10
    while len(ended) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(ended) == ["a", "b", "c"]
    assert first.status is third.status is RequestStatus.LENGTH
    assert second.status is RequestStatus.ABORTED
    assert second.output_token_ids == []
    assert len(llm.generate([[1, 2]], greedy)[0].outputs[0].token_ids) == 1
