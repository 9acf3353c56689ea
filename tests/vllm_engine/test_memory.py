"""A long request with wide states leaves vLLM in chunks: no step holds it a second time."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import reference
from layertap import LLM, SamplingParams, reader
from tiny_models import VOCAB
from vllm_engine.support import settle, writer_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TOKENS = 32_768
# One narrow head and a narrow MLP: 32k tokens are cheap to compute, and their states are wide all the same.
SHAPE = {
    "hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 40_000,
}  # fmt: skip
LAYERS = [3, 0, 1, 2]
STATES = TOKENS * len(LAYERS) * SHAPE["hidden_size"] * 4  # 403 MB
CHUNK, RING = 2 << 20, 8 << 20
# Of the allocators, the sink's pieces and the interpreter: noise beside the states.
SLACK = 32 << 20


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Appends how far the process's own memory has risen at most, in bytes. Mapped files do not count, and
    what is swapped out does: a machine takes pages away at any time, and their coming back is no rise."""
    done = threading.Event()

    def taken() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))

    before = peak = taken()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, taken())

    risen: list[int] = []
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield risen
    finally:
        done.set()
        thread.join()
        risen.append(max(peak, taken()) - before)


def test_a_request_of_32k_tokens_is_gathered_in_chunks_within_the_ring(
    start: Callable[..., LLM], tiny: Callable[..., str], tmp_path: Path
) -> None:
    extra = {"shared_storage_path": str(tmp_path), "staging_chunk_bytes": CHUNK, "staging_ring_bytes": RING}
    llm = start(
        tiny("llama", **SHAPE),
        layers=LAYERS,
        kv_transfer_config={"kv_connector": "LayertapConnector", "kv_connector_extra_config": extra},
        max_model_len=TOKENS + 1,
        max_num_batched_tokens=2048,
        block_size=128,
        kv_cache_memory_bytes=STATES + (96 << 20),
        enable_prefix_caching=False,
    )
    assert writer_of(llm).producer.cache.untyped_storage().nbytes() > STATES
    draw = random.Random(0)
    prompt = [draw.randrange(10, VOCAB) for _ in range(TOKENS)]

    def run(tokens: object) -> tuple[str, int]:
        """The record's path, and how far memory rose."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, kv_transfer_params={"tokens": tokens}
        )
        with peak_memory() as risen:
            (output,) = llm.generate([prompt], params)
        assert output.kv_transfer_params is not None
        settle(llm)
        return output.kv_transfer_params["hidden_states_path"], risen[0]

    run("last")  # touches every page of the cache, and lets vLLM allocate what it needs for such a request
    of_the_model = max(run("last")[1], run("last")[1])
    path, with_all_states = run("all")
    rises = f"{of_the_model >> 20} MiB with one row kept, {with_all_states >> 20} MiB with all"
    print("resident memory rose by", rises)
    assert os.path.getsize(path) > STATES
    assert with_all_states - of_the_model < RING + SLACK, rises
    stats = writer_of(llm).producer.stats()
    assert stats["staging_bytes"] <= RING
    assert 1 <= stats["staging_buffers_peak"] <= stats["staging_buffers"] == RING // CHUNK
    assert stats["bytes_written"] > STATES > 40 * RING

    states = reader.open(path, timeout=0)  # checks the checksums
    assert states.token_ids.tolist() == prompt
    assert states.hidden_states.shape == (TOKENS, len(LAYERS), SHAPE["hidden_size"])
    right = reference.states(tiny("llama", **SHAPE), prompt[:600])[:, LAYERS]  # later tokens do not change it
    reference.assert_states(states.hidden_states[:600], right, 1e-4)
