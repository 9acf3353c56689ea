from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from layertap import LLM
from vllm_engine.support import HAS_VLLM, SHAPES, WHY_NOT, vllm_options


@pytest.fixture(scope="module")
def start(tiny: Callable[..., str]) -> Iterator[Callable[..., LLM]]:
    """``start("llama", layers=[...])``: a small vLLM engine over a tiny model; closed at the module's end."""
    if not HAS_VLLM:
        pytest.skip(WHY_NOT)
    running: list[LLM] = []

    def go(model: str = "llama", changes: Mapping[str, Any] | None = None, **options: Any) -> LLM:
        for llm in running:  # vLLM keeps one engine in a process
            llm.close()
        running.clear()
        path = (
            model if "/" in model or model == "smollm2" else tiny(model, **SHAPES[model], **(changes or {}))
        )
        running.append(LLM(path, **vllm_options(**options)))
        return running[0]

    yield go
    for llm in running:
        llm.close()


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter for engines in processes of their own."""
    if not HAS_VLLM:
        pytest.skip(WHY_NOT)
    return sys.executable
