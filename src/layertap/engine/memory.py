"""How many cache blocks fit."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from layertap.config import EngineConfig
from layertap.errors import InvalidInputError

if TYPE_CHECKING:
    from layertap.engine.verifier import Verifier

logger = logging.getLogger("layertap")

_CPU_SHARE = 10
_CPU_MOST = 2 << 30


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def machine_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as f:
            limit = f.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def cache_bytes(config: EngineConfig, device: torch.device, activation_bytes: int) -> int:
    """Memory for all caches together.

    Args:
        activation_bytes: what a full step needs beside the weights (CUDA; measured).
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = int(total * config.gpu_memory_utilization) - (total - free - reserved) - activation_bytes
        if budget <= 0:
            raise InvalidInputError(
                "gpu_memory_utilization",
                config.gpu_memory_utilization,
                f"enough for the model: of {format_bytes(total)}, {format_bytes(total - free)} are in use "
                f"and a full step needs {format_bytes(activation_bytes)} more; raise it, lower "
                "max_num_batched_tokens or use a larger GPU",
            )
        return budget
    return min(machine_memory() // _CPU_SHARE, _CPU_MOST)


def num_blocks_for(config: EngineConfig, verifier: Verifier, hidden_bytes_per_token: int, budget: int) -> int:
    """Blocks that fit into ``budget`` bytes, and the longest sequence that they allow.

    Shortens ``verifier.max_model_len`` to what fits, unless the user asked for a length.

    Raises:
        InvalidInputError: not even one block, or not the length that was asked for.
    """
    per_token = verifier.kv_bytes_per_token + hidden_bytes_per_token
    per_block = max(per_token, 1) * config.block_size
    blocks = budget // per_block - 1  # one block is for padding
    capacity = blocks * config.block_size
    asked = config.max_model_len
    if capacity < min(asked or config.block_size, verifier.max_model_len):
        needed = per_block * (-(-(asked or config.block_size) // config.block_size) + 1)
        raise InvalidInputError(
            "kv_cache_memory_bytes",
            budget,
            f"at least {needed} ({format_bytes(needed)}) for a sequence of "
            f"{asked or config.block_size} tokens at {format_bytes(per_token)} a token; give more, or lower "
            "max_model_len",
        )
    if verifier.max_model_len > capacity:
        logger.warning(
            "max_model_len is %d: %d tokens of cache fit into %s (the model allows %d)",
            capacity, capacity, format_bytes(budget), verifier.max_model_len,
        )  # fmt: skip
        verifier.max_model_len = capacity
    if per_token == 0:
        blocks = 1 << 16
    # More blocks than can ever be in use would only cost time at start.
    most = config.max_num_seqs * -(-verifier.max_model_len // config.block_size)
    return int(min(blocks, max(most, 1)))
