"""What a test does with a small engine: asks it for states, waits for it, looks at what it left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from layertap import LLM


def file_config(folder: Path | str, **extra: Any) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for files in ``folder``."""
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder), **extra},
    }


def extract(llm: LLM, prompts: list[list[int]], **kwargs: Any) -> list[torch.Tensor]:
    return [s.hidden_states for s in llm.extract(prompts, **kwargs)]


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def published(folder: Path) -> list[str]:
    """What lies under a final name. Only the engine's own lock file may be hidden beside it, no partial
    file."""
    hidden = [name for name in os.listdir(folder) if name.startswith(".")]
    assert all(name.startswith(".layertap-") and name.endswith(".lock") for name in hidden), hidden
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def all_blocks_free(llm: LLM) -> bool:
    stats = llm.stats()
    return bool(stats["num_free_blocks"] == stats["num_blocks"])
