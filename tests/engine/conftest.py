"""What the tests of compiled layers share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layertap import LLM

PROMPTS = [[3, 5, 7, 11, 2, 9], [8, 1, 4]]


@pytest.fixture
def compiled_gives_the_same(make_llm: Callable[..., LLM], tiny: Callable[..., str]) -> Callable[[str], None]:
    """Compares a tiny model's states at every boundary, with its layers compiled and without."""

    def compare(name: str) -> None:
        torch._dynamo.reset()  # what another test has compiled would not be compiled again
        plain = {
            len(record.token_ids): record.hidden_states
            for record in make_llm(tiny(name), layers=[0, 1, 2]).extract(PROMPTS)
        }
        for record in make_llm(tiny(name), layers=[0, 1, 2], enforce_eager=False).extract(PROMPTS):
            expected = plain[len(record.token_ids)]
            torch.testing.assert_close(record.hidden_states, expected, rtol=1e-4, atol=1e-5)

    return compare
