"""vLLM's CPU build, run in this process: no start-up of further ones, and its scheduler can be looked at."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HAS_VLLM = importlib.util.find_spec("vllm") is not None
WHY_NOT = "vLLM is not installed here; scripts/setup_vllm_cpu.sh makes an environment with it"
# Head sizes that vLLM's CPU attention takes start at 32.
SHAPES: dict[str, dict[str, Any]] = {
    name: {"head_dim": 32} for name in ("llama", "qwen3", "qwen3_moe", "mistral", "gpt_oss", "gemma3")
}


def vllm_options(**more: Any) -> dict[str, Any]:
    """A small engine."""
    return {
        "engine": "vllm",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 16 << 20,
        **more,
    }


def vllm_of(llm: Any) -> Any:
    """Our wrapper of vLLM's engine."""
    return llm._vllm


def scheduler_of(llm: Any) -> Any:
    """vLLM's scheduler, in this process."""
    return vllm_of(llm).llm.llm_engine.engine_core.engine_core.scheduler


def writer_of(llm: Any) -> Any:
    """Our worker half."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._writer


def settle(llm: Any) -> None:
    """Wait until vLLM has nothing to do."""
    import time

    deadline = time.monotonic() + 30
    while scheduler_of(llm).has_requests():
        assert time.monotonic() < deadline, "vLLM does not come to rest"
        time.sleep(0.005)
    vllm_of(llm).call(lambda: None)  # the step that was under way is over


def free_blocks(llm: Any) -> int:
    return int(scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def leftovers(folder: Path | str) -> list[str]:
    """Files of a storage folder, without the sink's own lock."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(".layertap-"))
