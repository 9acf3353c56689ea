"""A small paged cache with known rows, and sinks that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from layertap.connectors.job import Completion, Job
from layertap.connectors.producer import Producer
from layertap.layers import ServedLayers
from layertap.selection import Selection
from layertap.sinks.base import RecordSpec, RecordWriter, Sink
from layertap.sinks.memory import MemorySink

SERVED = ServedLayers((0, 3, 5), 6)


def paged_cache(
    num_blocks: int = 64,
    block_size: int = 4,
    hidden_size: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    num_columns: int = 3,
    head_first: bool = False,
) -> torch.Tensor:
    """[num_blocks, block_size, C, H] of random rows; ``head_first``: strided like [blocks, C, block, H]."""
    generator = torch.Generator().manual_seed(7)
    cache = torch.randn(num_blocks, block_size, num_columns, hidden_size, generator=generator).to(dtype)
    return cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) if head_first else cache


def naive_rows(
    cache: torch.Tensor, block_ids: Sequence[int], positions: Sequence[int], columns: Sequence[int]
):
    size = cache.shape[1]
    return torch.stack([cache[block_ids[p // size], p % size, list(columns)] for p in positions])


def make_job(
    request_id: str, num_tokens: int, block_ids: Sequence[int], params=None, num_prompt_tokens=None
) -> Job:
    return Job(
        request_id,
        list(range(100, 100 + num_tokens)),
        num_tokens,
        num_tokens if num_prompt_tokens is None else num_prompt_tokens,
        list(block_ids),
        Selection.parse(params, SERVED),
    )


def make_producer(cache: torch.Tensor, sink: Sink | None = None, **settings) -> Producer:
    settings = {"chunk_bytes": 1 << 16, "ring_bytes": 1 << 18, "num_writers": 2, **settings}
    return Producer(
        cache, sink if sink is not None else MemorySink(), model="tiny", layers=SERVED, **settings
    )


def drain(
    producer: Producer, num_completed: int, timeout: float = 10
) -> tuple[list[str], dict[str, Completion]]:
    """Wait for completions; returns the ids reported copied, in order, and what was completed."""
    copied: list[str] = []
    completed: dict[str, Completion] = {}
    while len(completed) < num_completed:
        news = producer.poll(timeout)
        assert news, f"nothing more came; so far {sorted(completed)}"
        for item in news:
            if item.kind == "copied":
                copied.append(item.request_id)
            else:
                assert item.request_id in copied, "completed before copied"
                completed[item.request_id] = item
    return copied, completed


class GatedWriter(RecordWriter):
    def __init__(self, inner: RecordWriter, sink: GatedSink) -> None:
        self.inner, self.sink = inner, sink

    def write(self, hidden_TLH, scales_T11=None) -> None:
        self.sink.writing.release()
        self.sink.gate.wait(10)
        if self.sink.error is not None:
            raise self.sink.error
        self.inner.write(hidden_TLH, scales_T11)

    def commit(self) -> str:
        return self.inner.commit()

    def abort(self) -> None:
        self.inner.abort()


class GatedSink(Sink):
    """Holds every write until ``gate`` is set, then fails with ``error`` if there is one."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.writing = threading.Semaphore(0)
        self.error: Exception | None = None

    def open(self, spec: RecordSpec) -> RecordWriter:
        return GatedWriter(self.inner.open(spec), self)

    def handle(self, request_id: str) -> str:
        return self.inner.handle(request_id)
