"""Small jobs for a sink that publishes many records in one call."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from connectors.helpers import drain, make_job, make_producer, naive_rows, paged_cache
from layertap.record import read_record, verify_record
from layertap.sinks import native_files
from layertap.sinks.base import RecordSpec, RecordWriter, WholeRecord
from layertap.sinks.file import FileSink

pytestmark = pytest.mark.skipif(native_files.library() is None, reason="no C++ compiler, or not Linux")


class Watched(FileSink):
    """Counts what is published together, and may hold it up or fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, threads=4)
        self.calls: list[int] = []
        self.alone = 0
        self.gate = threading.Event()
        self.gate.set()
        self.at_once = self.most_at_once = 0
        self.error: Exception | None = None
        self.guard = threading.Lock()

    def open(self, spec: RecordSpec) -> RecordWriter:
        with self.guard:
            self.alone += 1
        return super().open(spec)

    def publish(self, records: Sequence[WholeRecord]) -> list[str | Exception]:
        with self.guard:
            self.calls.append(len(records))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.gate.wait(10)
        with self.guard:
            self.at_once -= 1
        if self.error is not None:
            raise self.error
        return super().publish(records)


@pytest.fixture
def sink(tmp_path: Path):  # type: ignore[no-untyped-def]
    sink = Watched(tmp_path)
    yield sink
    sink.close()


def until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def names(sink: FileSink) -> list[str]:
    return sorted(n for n in os.listdir(sink.storage_path) if not n.endswith(".lock"))


@pytest.mark.parametrize("dtype", ["auto", "float32", "float8_e4m3fn"])
def test_records_hold_what_the_cache_held(sink: Watched, dtype: str) -> None:
    cache = paged_cache(num_blocks=64)
    producer = make_producer(cache, sink, num_writers=6)
    jobs = [make_job(f"r{i}", 8 + i % 3, [i % 64, 63 - i % 64, 5], {"dtype": dtype}) for i in range(100)]
    producer.submit(*jobs)
    copied, completed = drain(producer, 100)
    producer.close()
    assert sorted(copied) == sorted(completed)
    assert sum(sink.calls) + sink.alone == 100
    assert sink.alone <= 1, "the last one may be left alone"
    assert len(sink.calls) < 20
    assert sink.most_at_once <= 2
    assert producer.ring.in_use == 0
    for i in range(0, 100, 7):
        record = read_record(completed[f"r{i}"].handle)
        expected = naive_rows(cache, jobs[i].block_ids, range(8 + i % 3), range(3)).float()
        tolerance = 0.07 if dtype == "float8_e4m3fn" else 0
        torch.testing.assert_close(record.dequantized.float(), expected, rtol=tolerance, atol=tolerance)
        verify_record(completed[f"r{i}"].handle)


def test_one_that_is_unfit_or_given_up_leaves_the_others_alone(sink: Watched) -> None:
    cache = paged_cache()
    cache[7, 2, 2, 5] = float("nan")
    os.mkdir(sink.handle("folder"))
    sink.gate.clear()
    producer = make_producer(cache, sink, num_writers=1)
    first = [make_job("first", 4, [20]), make_job("second", 4, [21])]
    producer.submit(*first)  # at the gate, while the others queue up
    until(lambda: sink.calls)
    assert not producer.cancel("first"), "its record is being published"
    names_and_blocks = {"good": 1, "nan": 7, "folder": 2, "dropped": 3, "no name": 5, "also": 4}
    jobs = [make_job(name, 4, [block]) for name, block in names_and_blocks.items()]
    producer.submit(*jobs)
    assert producer.cancel("dropped")
    sink.gate.set()
    _, completed = drain(producer, 8)
    producer.close()
    kinds = {name: done.error.kind for name, done in completed.items() if done.error is not None}
    assert kinds == {
        "nan": "not_finite", "folder": "storage", "dropped": "aborted", "no name": "engine"
    }  # fmt: skip
    assert len(names(sink)) == 5, "four records, and the folder"


def test_a_sink_that_raises_fails_those_jobs_and_the_thread_lives_on(sink: Watched) -> None:
    producer = make_producer(paged_cache(), sink, num_writers=2)
    sink.error = OSError(errno.ENOSPC, "No space left on device")
    producer.submit(*(make_job(f"r{i}", 4, [i]) for i in range(6)))
    _, completed = drain(producer, 6)
    assert {done.error.kind for done in completed.values() if done.error} == {"storage_full"}
    sink.error = None
    producer.submit(*(make_job(f"r{i}", 4, [i]) for i in range(6)))
    _, completed = drain(producer, 6)
    assert all(done.error is None for done in completed.values())
    producer.close()
    assert len(names(sink)) == 6


def test_large_jobs_go_past_small_ones_that_wait_for_a_thread(sink: Watched) -> None:
    cache = paged_cache(num_blocks=256)
    sink.gate.clear()
    producer = make_producer(cache, sink, num_writers=4, chunk_bytes=4800, ring_bytes=48000)
    for i in range(2):  # two threads stand at the gate
        producer.submit(make_job(f"a{i}", 4, [i]), make_job(f"b{i}", 4, [i]))
        until(lambda i=i: sink.at_once == i + 1)
    producer.submit(make_job("large", 100, range(25)))
    until(lambda: "large.safetensors" in names(sink))
    producer.submit(make_job("c0", 4, [9]), make_job("c1", 4, [9]))
    time.sleep(0.05)
    assert sink.at_once == 2
    assert producer.stats()["requests_queued"] == 2
    sink.gate.set()
    _, completed = drain(producer, 7)
    producer.close()
    assert all(done.error is None for done in completed.values())
    assert sink.most_at_once == 2


@pytest.mark.parametrize("drained", [True, False])
def test_closing_ends_threads_that_wait_for_their_turn(sink: Watched, drained: bool) -> None:
    threads = threading.active_count()
    sink.gate.clear()
    producer = make_producer(paged_cache(), sink, num_writers=5)
    for i in range(20):
        producer.submit(make_job(f"a{i}", 4, [i]), make_job(f"b{i}", 4, [i]))
    until(lambda: sink.at_once == 2)
    threading.Timer(0.1, sink.gate.set).start()
    producer.close(drain=drained)
    ended = [news for news in producer.poll() if news.kind == "completed"]
    assert len(ended) == 40
    published = sum(news.error is None for news in ended)
    assert published == 40 if drained else 4 <= published < 40
    assert len(names(sink)) == published
    until(lambda: threading.active_count() == threads)
