"""What the tests of compiled layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layertap import LLM
from layertap.engine import compile as compiling
from layertap.engine import fused_products

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


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused as if there were kernels for every product; PyTorch does the work."""
    for module in (fused_products, compiling):
        monkeypatch.setattr(module, "takes", lambda weight: True)
    monkeypatch.setattr(fused_products, "LEAST_ROWS", 10**9)


@pytest.fixture
def counts_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """By the name of a pass over layers' graphs: how much it fuses in each graph from now on."""

    def count(name: str) -> list[int]:
        fuse, counts = getattr(compiling, name), []

        def counted(graph: Any) -> int:
            counts.append(fuse(graph))
            return counts[-1]

        monkeypatch.setattr(compiling, name, counted)
        return counts

    return count
