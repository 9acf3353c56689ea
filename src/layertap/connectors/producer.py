"""Carries hidden states from the paged cache to a sink, in threads beside the engine's.

It knows a cache tensor, a block size and a sink; it does not know which engine it is in. Each writer thread
takes one job at a time and moves it chunk by chunk: staging buffer, gather, check, write. Whatever the
backlog, memory is bounded by the staging ring; blocks of waiting jobs stay allocated, and that is the
back-pressure on the scheduler.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layertap.connectors.gather import CpuGather, CudaGather, Gather
from layertap.connectors.job import Completion, Job
from layertap.connectors.staging import StagingRing
from layertap.connectors.transfer import Cancelled, Transfer
from layertap.errors import ExtractionError, InvalidInputError
from layertap.layers import ServedLayers
from layertap.sinks.base import Sink

DEFAULT_CHUNK_BYTES = 64 << 20
DEFAULT_RING_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class _Task:
    job: Job
    ready: Any
    started: bool = False
    cancelled: bool = False
    publishing: bool = False
    copied: bool = False

    def given_up(self) -> bool:
        return self.cancelled


class Producer:
    """Moves the hidden states of ended requests to a sink.

    Args:
        cache: [num_blocks, block_size, C, H] of any strides, float32, bfloat16 or float16, on CPU or GPU.
        sink: where records go. The producer does not close it.
        model: the model's name, for the records' metadata.
        layers: what the cache's columns are.
        chunk_bytes: size of one staging buffer; raised to one token's row if it is smaller.
        ring_bytes: staging memory in all; at least one buffer.
        num_writers: threads, each of which moves one job at a time.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        sink: Sink,
        *,
        model: str,
        layers: ServedLayers,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        ring_bytes: int = DEFAULT_RING_BYTES,
        num_writers: int = 2,
    ) -> None:
        assert cache.dim() == 4
        assert cache.shape[2] == len(layers.columns), "the cache has one column for each tapped boundary"
        assert cache.dtype in (torch.float32, torch.bfloat16, torch.float16)
        self.cache = cache
        self.sink = sink
        self.model = model
        self.layers = layers
        row_bytes = cache.shape[2] * cache.shape[3] * 4
        chunk_bytes = max(chunk_bytes, row_bytes)
        self.ring = StagingRing(max(1, ring_bytes // chunk_bytes), chunk_bytes, cache.is_cuda)
        self.bytes_written = 0
        self.tokens_written = 0
        self.gather_seconds = 0.0
        self.write_seconds = 0.0
        self._finished = {"completed": 0, "failed": 0}
        self._tasks: dict[str, _Task] = {}
        self._news: deque[Completion] = deque()
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"layertap-writer-{i}", daemon=True)
            for i in range(num_writers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Take an ended request on. Its blocks must stay as they are until :meth:`poll` reports it copied.

        On a GPU the states need only be valid once the work queued so far on the current stream is done.

        Raises:
            InvalidInputError: a job of this request id is still under way.
        """
        ready = None
        if self.cache.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self.cache.device))
        task = _Task(job, ready)
        with self._changed:
            if self._closed:
                raise RuntimeError("the producer is closed")
            if job.request_id in self._tasks:
                raise InvalidInputError(
                    "request_id", job.request_id, "an id that is not being delivered already"
                )
            self._tasks[job.request_id] = task
        self._queue.put(task)

    def poll(self, timeout: float = 0) -> list[Completion]:
        """All news since the last call, oldest first; waits up to ``timeout`` seconds if there is none."""
        if timeout > 0:
            self.wait(timeout)
        elif not self._news:
            return []
        with self._changed:
            news = list(self._news)
            self._news.clear()
        return news

    def wait(self, timeout: float | None) -> bool:
        """Block until :meth:`poll` has news; False if there was none in ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._news), timeout)

    def cancel(self, request_id: str) -> bool:
        """Abort a job, queued or being written. True: nothing of it will be published, and :meth:`poll`
        reports it copied and failed (kind ``aborted``). False: it is unknown, or its record is being
        published."""
        with self._changed:
            task = self._tasks.get(request_id)
            if task is None or task.publishing:
                return False
            task.cancelled = True
            if not task.started:
                self._report_end(task, error=_aborted(request_id))
        self.ring.wake()
        return True

    def check(self, columns: Sequence[int]) -> None:
        """Refuse a selection whose rows do not fit a staging buffer (layers asked for many times over).

        Raises:
            InvalidInputError: naming the most layers that fit.
        """
        fits = self.ring.chunk_bytes // (self.cache.shape[3] * 4)
        if len(columns) > fits:
            raise InvalidInputError(
                "kv_transfer_params.layers", f"{len(columns)} layers", f"at most {fits} layers"
            )

    @property
    def idle(self) -> bool:
        """Nothing is queued or being written."""
        return not self._tasks

    def stats(self) -> dict[str, float]:
        """Counters for metrics. Seconds are summed over the writer threads: what they spend waiting for rows
        (``gather``), in the sink (``write``) and waiting for a buffer (``staging_wait``)."""
        with self._changed:
            started = sum(task.started for task in self._tasks.values())
            queued = len(self._tasks) - started
        return {
            "requests_queued": queued,
            "requests_writing": started,
            "requests_completed": self._finished["completed"],
            "requests_failed": self._finished["failed"],
            "bytes_written": self.bytes_written,
            "tokens_written": self.tokens_written,
            "gather_seconds": self.gather_seconds,
            "write_seconds": self.write_seconds,
            "staging_buffers": self.ring.num_buffers,
            "staging_buffers_in_use": self.ring.in_use,
            "staging_buffers_peak": self.ring.high_water,
            "staging_bytes": self.ring.allocated_bytes,
            "staging_wait_seconds": self.ring.wait_seconds,
        }

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Deliver what was submitted (``drain``) or abort it, and end the threads. :meth:`poll` still gives
        the news."""
        with self._changed:
            first, self._closed = not self._closed, True
            waiting = list(self._tasks)
        if not drain:
            for request_id in waiting:
                self.cancel(request_id)
        if first:
            for _ in self._threads:
                self._queue.put(None)
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.ring.close()

    def _run(self) -> None:
        gather: Gather = CudaGather(self.cache) if self.cache.is_cuda else CpuGather(self.cache)
        while (task := self._queue.get()) is not None:
            with self._changed:
                if task.cancelled:
                    continue
                task.started = True
            self._deliver(task, gather)

    def _deliver(self, task: _Task, gather: Gather) -> None:
        job = task.job
        transfer = Transfer(
            job, gather, self.ring, self.sink, task.ready, task.given_up, lambda: self._report_copied(task)
        )
        try:
            transfer.run(self.model, self.layers)
            with self._changed:
                task.publishing = not task.cancelled
            if not task.publishing:
                raise Cancelled
            handle = transfer.commit()
        except Exception as error:  # noqa: BLE001 - a sink may raise anything; the thread lives on
            transfer.abort()
            with self._changed:
                self._report_end(task, error=_explain(job.request_id, error))
        else:
            with self._changed:
                self.bytes_written += transfer.num_bytes
                self.tokens_written += transfer.num_rows
                self.gather_seconds += transfer.gather_seconds
                self.write_seconds += transfer.write_seconds
                self._report_end(task, handle=handle)

    def _report_copied(self, task: _Task) -> None:
        with self._changed:
            task.copied = True
            self._news.append(Completion("copied", task.job.request_id))
            self._changed.notify_all()

    def _report_end(
        self, task: _Task, handle: str | None = None, error: ExtractionError | None = None
    ) -> None:
        """Under the lock."""
        request_id = task.job.request_id
        if not task.copied:
            self._news.append(Completion("copied", request_id))
        self._news.append(Completion("completed", request_id, handle, error))
        self._finished["failed" if error else "completed"] += 1
        del self._tasks[request_id]
        self._changed.notify_all()


def _aborted(request_id: str) -> ExtractionError:
    return ExtractionError(request_id, "aborted; nothing was published", "aborted")


def _explain(request_id: str, error: Exception) -> ExtractionError:
    """The request's error for whatever went wrong with its transfer."""
    if isinstance(error, ExtractionError):
        return error
    if isinstance(error, Cancelled):
        return _aborted(request_id)
    if isinstance(error, OSError):
        return storage_error(request_id, error)
    reason = f"hidden states could not be delivered: {type(error).__name__}: {error}"
    failure = ExtractionError(request_id, reason, "engine")
    failure.__cause__ = error
    return failure


def storage_error(request_id: str, error: OSError) -> ExtractionError:
    """The request's error for a sink that could not store: kind ``storage_full`` or ``storage``."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f" ({error.filename})" if error.filename else ""
    todo = "make room and send it again" if full else "check the storage and send it again"
    reason = f"hidden states could not be stored: {error.strerror or error}{where}; {todo}"
    failure = ExtractionError(request_id, reason, "storage_full" if full else "storage")
    failure.__cause__ = error
    return failure
