"""Carries hidden states from the paged cache to a sink, in threads beside the engine's.

It knows a cache tensor, a block size and a sink; it does not know which engine it is in. A writer thread
takes a large job by itself and moves it chunk by chunk (staging buffer, gather, check, write), or several
small ones that fit into one staging buffer: they are gathered at once, and written one by one. Whatever the
backlog, memory is bounded by the staging ring; blocks of waiting jobs stay allocated, and that is the
back-pressure on the scheduler.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layertap.connectors.failures import aborted, explain
from layertap.connectors.gather import Chunk, CpuGather, CudaGather, Gather, PagedRows
from layertap.connectors.job import Completion, Job
from layertap.connectors.staging import StagingRing
from layertap.connectors.transfer import Cancelled, Transfer, acquire, all_sound, row_bytes
from layertap.errors import ExtractionError, InvalidInputError
from layertap.layers import ServedLayers
from layertap.sinks.base import Sink, WholeRecord

DEFAULT_CHUNK_BYTES = 64 << 20
DEFAULT_RING_BYTES = 256 << 20
_MOST_TOGETHER = 32  # small jobs of one gather: they wait for one another's writes
_TINY_BYTES = 1 << 20  # so little is gathered together whatever the number of jobs, where nothing is written
# Threads at a time that take small jobs to a sink that publishes many in one call. Each that wants the GIL
# costs whoever launches an engine's steps; the sink writes in threads that do without it.
_TOGETHER_THREADS = 2
_WORTH_SHARING = 8  # fewer of them are left to one thread
_ONE_THREAD = 32768  # torch copies tensors of up to this many elements on the calling thread
# Whoever waits for news of small jobs is woken no more often than this: the engine's thread then takes the
# GIL away from the writers. Whoever looks finds a job as soon as its record is published.
_NEWS_SECONDS = 0.005


@dataclass(slots=True, eq=False)
class _Task:
    job: Job
    ready: tuple[Any, ...]
    """The event after which its rows are valid, on a GPU."""
    num_rows: int
    """Kept tokens; 0 where the selection does not fit the sequence, which is told when it is moved."""
    started: bool = False
    cancelled: bool = False
    publishing: bool = False
    copied: bool = False
    handle: str | None = None
    """Of its record, once that is published."""

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
        num_writers: threads that gather and write.
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
        if cache.is_cuda:
            # The kernel is compiled here, and not by several writers at once.
            first = torch.zeros(1, dtype=torch.int64, device=cache.device)
            PagedRows(cache).pick(first, range(cache.shape[2]))
        self.bytes_written = 0
        self.tokens_written = 0
        self.gather_seconds = 0.0
        self.write_seconds = 0.0
        self._finished = {"completed": 0, "failed": 0}
        self._tasks: dict[str, _Task] = {}
        self._news: deque[Completion] = deque()
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._work = threading.Condition(self._guard)
        self._queue: deque[_Task] = deque()
        self._together = 0
        """Threads that are about small jobs for a sink that publishes many in one call."""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"layertap-writer-{i}", daemon=True)
            for i in range(num_writers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *jobs: Job) -> None:
        """Take ended requests on: those of one step together, if possible. Their blocks must stay as they are
        until :meth:`poll` reports them copied.

        On a GPU the states need only be valid once the job's event has come, or, where it has none, the work
        queued so far on the current stream is done.

        Raises:
            InvalidInputError: a job of this request id is still under way; none of ``jobs`` is taken.
        """
        now: tuple[Any, ...] = ()
        if self.cache.is_cuda and any(job.ready is None for job in jobs):
            now = (torch.cuda.Event(),)  # type: ignore[no-untyped-call]
            now[0].record(torch.cuda.current_stream(self.cache.device))
        tasks = {
            job.request_id: _Task(job, now if job.ready is None else (job.ready,), _num_rows(job))
            for job in jobs
        }
        with self._changed:
            if self._closed:
                raise RuntimeError("the producer is closed")
            for request_id in tasks:
                if request_id in self._tasks or len(tasks) != len(jobs):
                    raise InvalidInputError(
                        "request_id", request_id, "an id that is not being delivered already"
                    )
            self._tasks.update(tasks)
            self._queue.extend(tasks.values())
            self._work.notify()  # who takes some wakes the next, if there is more

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
                self._report_end(task, error=aborted(request_id))
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
            self._closed = True
            waiting = list(self._tasks)
        if not drain:
            for request_id in waiting:
                self.cancel(request_id)
        with self._changed:
            self._work.notify_all()
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.ring.close()

    def _run(self) -> None:
        gather: Gather = CudaGather(self.cache) if self.cache.is_cuda else CpuGather(self.cache)
        while True:
            tasks, counted = self._take(gather)
            if not tasks:
                return
            try:
                if len(tasks) == 1:
                    self._deliver(tasks[0], gather)
                else:
                    self._deliver_together(tasks, gather)
            finally:
                if counted:
                    with self._changed:
                        self._together -= 1
                        self._work.notify()

    def _is_small(self, task: _Task, gather: Gather) -> bool:
        """Whether it is a job for few threads: for a sink that publishes many such in one call."""
        row = row_bytes(task.job.selection, gather)
        return self.sink.publishes_together and 0 < 4 * task.num_rows * row <= self.ring.chunk_bytes

    def _take(self, gather: Gather) -> tuple[list[_Task], bool]:
        """The next job, and with it small ones that are gathered alike; this thread's share of them.

        Returns:
            Jobs, none when there will be none any more; and whether they count in ``_together`` until they
            are delivered.
        """
        with self._changed:
            while True:
                while self._queue and self._queue[0].cancelled:
                    self._queue.popleft()  # reported already
                if self._queue and not (
                    self._together >= _TOGETHER_THREADS and self._is_small(self._queue[0], gather)
                ):
                    break
                if self._closed and not self._queue:
                    self._work.notify_all()
                    return [], False
                self._work.wait()
            first = self._queue.popleft()
            small = self._is_small(first, gather)
            tasks = [first]
            kind = (first.job.selection.columns, first.job.selection.dtype)
            row = row_bytes(first.job.selection, gather)
            rows, most_rows = first.num_rows, self.ring.chunk_bytes // row
            threads = min(_TOGETHER_THREADS, len(self._threads)) if small else len(self._threads)
            share = -(-(len(self._queue) + 1) // threads)
            share = min(_MOST_TOGETHER, max(share, _WORTH_SHARING) if small else share)
            tiny_bytes = _TINY_BYTES if self.sink.keeps_rows else 0
            while self._queue and first.num_rows:
                task = self._queue[0]
                selection = task.job.selection
                if (selection.columns, selection.dtype) != kind or not 0 < task.num_rows <= most_rows - rows:
                    break
                if len(tasks) >= share and (rows + task.num_rows) * row > tiny_bytes:
                    break
                self._queue.popleft()
                if not task.cancelled:
                    tasks.append(task)
                    rows += task.num_rows
            # One alone, among others of another kind, say, is no reason for others to wait.
            counted = small and len(tasks) > 1
            self._together += counted
            for task in tasks:
                task.started = True
            if self._queue:
                self._work.notify()
        return tasks, counted

    def _deliver(self, task: _Task, gather: Gather) -> None:
        transfer = Transfer(task.job, gather, self.sink, task.given_up)

        def move() -> None:
            transfer.prepare(self.model, self.layers)
            transfer.open()
            transfer.move(self.ring, task.ready, lambda: self._report_copied(task))

        if self._finish(task, transfer, move):
            self._report_published((task, transfer))
        self._note_gather(transfer.gather_seconds)

    def _deliver_together(self, tasks: Sequence[_Task], gather: Gather) -> None:
        """Gather jobs whose rows fit into one buffer, then write each. One that fails leaves the others
        alone."""
        moving: list[tuple[_Task, Transfer]] = []
        for task in tasks:
            transfer = Transfer(task.job, gather, self.sink, task.given_up)
            try:
                transfer.prepare(self.model, self.layers)
            except Exception as error:  # noqa: BLE001 - whatever it is, the thread lives on
                self._fail(task, transfer, error)
            else:
                moving.append((task, transfer))
        if not moving:
            return
        buffer = None
        try:
            buffer = acquire(self.ring, lambda: all(task.cancelled for task, _ in moving))
            begun = time.monotonic()
            slots = np.concatenate([transfer.slots_T for _, transfer in moving])
            columns, dtype = moving[0][0].job.selection.columns, moving[0][1].dtype
            # Submitted on several streams, perhaps: the last event does not stand for the others.
            ready = dict.fromkeys(event for task, _ in moving for event in task.ready)
            chunk = gather.finish(gather.start(slots, columns, dtype, buffer, ready))
            self._note_gather(time.monotonic() - begun)
            sizes = [len(transfer.slots_T) for _, transfer in moving]
            own = self.sink.keeps_rows and max(sizes) * chunk.hidden[0].numel() <= _ONE_THREAD
            parts = _split(chunk, sizes, own)
            sound = all_sound(chunk.absmax, dtype, gather.dtype)
        except Exception as error:  # noqa: BLE001 - as above
            for task, transfer in moving:
                self._fail(task, transfer, error)
        else:
            self._report_copied(*[task for task, _ in moving])
            if self.sink.publishes_together:
                self._publish(moving, parts, sound)
            else:
                self._write_each(moving, parts, sound, own)
        finally:
            if buffer is not None:
                self.ring.release(buffer)

    def _write_each(
        self, moving: Sequence[tuple[_Task, Transfer]], parts: Sequence[Chunk], sound: bool, own: bool
    ) -> None:
        """Write jobs, one after the other. For ``sound`` and ``own`` see :meth:`Transfer.put`."""
        woken = time.monotonic()
        for (task, transfer), rows in zip(moving, parts, strict=True):

            def write(transfer: Transfer = transfer, rows: Chunk = rows) -> None:
                transfer.open()  # only now: open files are scarce
                transfer.put(rows, sound, own)

            if self._finish(task, transfer, write):
                now = time.monotonic()
                wake = now - woken > _NEWS_SECONDS
                self._report_published((task, transfer), wake=wake)
                woken = now if wake else woken
        with self._changed:
            self._changed.notify_all()

    def _publish(self, moving: Sequence[tuple[_Task, Transfer]], parts: Sequence[Chunk], sound: bool) -> None:
        """Have jobs written and published by the sink in one call."""
        whole: list[tuple[_Task, Transfer, WholeRecord]] = []
        for (task, transfer), rows in zip(moving, parts, strict=True):
            try:
                whole.append((task, transfer, transfer.whole(rows, sound)))
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(task, transfer, error)
        with self._changed:
            for task, _, _ in whole:
                task.publishing = not task.cancelled
        for task, transfer, _ in whole:
            if not task.publishing:
                self._fail(task, transfer, Cancelled())
        whole = [item for item in whole if item[0].publishing]
        begun = time.monotonic()
        results: Sequence[str | Exception]
        try:
            results = self.sink.publish([record for _, _, record in whole])
        except Exception as error:  # noqa: BLE001 - as above
            results = [error] * len(whole)
        share = (time.monotonic() - begun) / max(1, len(whole))
        published = []
        for (task, transfer, _), result in zip(whole, results, strict=True):
            transfer.write_seconds = share
            if isinstance(result, Exception):
                self._fail(task, transfer, result)
            else:
                task.handle = result
                published.append((task, transfer))
        self._report_published(*published)

    def _finish(self, task: _Task, transfer: Transfer, move: Callable[[], None]) -> bool:
        """Have a job's rows written and publish its record, which is still to be reported then. A failure is
        reported, and False."""
        try:
            move()
            transfer.check_whole()
            with self._changed:
                task.publishing = not task.cancelled
            if not task.publishing:
                raise Cancelled
            task.handle = transfer.commit()
        except Exception as error:  # noqa: BLE001 - a sink may raise anything; the thread lives on
            self._fail(task, transfer, error)
            return False
        return True

    def _fail(self, task: _Task, transfer: Transfer, error: Exception) -> None:
        transfer.abort()
        with self._changed:
            self._report_end(task, error=explain(task.job.request_id, error))

    def _note_gather(self, seconds: float) -> None:
        with self._changed:
            self.gather_seconds += seconds

    def _report_copied(self, *tasks: _Task) -> None:
        with self._changed:
            for task in tasks:
                task.copied = True
                self._news.append(Completion("copied", task.job.request_id))
            self._changed.notify_all()

    def _report_published(self, *published: tuple[_Task, Transfer], wake: bool = True) -> None:
        with self._changed:
            for task, transfer in published:
                self.bytes_written += transfer.num_bytes
                self.tokens_written += transfer.num_rows
                self.write_seconds += transfer.write_seconds
                self._report_end(task, wake=False)
            if wake:
                self._changed.notify_all()

    def _report_end(self, task: _Task, error: ExtractionError | None = None, wake: bool = True) -> None:
        """Under the lock."""
        request_id = task.job.request_id
        if not task.copied:
            self._news.append(Completion("copied", request_id))
        self._news.append(Completion("completed", request_id, task.handle, error))
        self._finished["failed" if error else "completed"] += 1
        del self._tasks[request_id]
        if wake:
            self._changed.notify_all()


def _split(chunk: Chunk, sizes: Sequence[int], own: bool) -> list[Chunk]:
    """Each job's rows, with ``own`` in memory of their own. In one call for all of them, as each call lets go
    of the GIL and then waits for another thread to let go of it in turn."""
    split: Callable[..., Sequence[torch.Tensor]] = (
        torch.split_with_sizes_copy if own else torch.split_with_sizes  # type: ignore[assignment]
    )
    hidden = split(chunk.hidden, sizes)
    scales = [None] * len(sizes) if chunk.scales is None else split(chunk.scales, sizes)
    absmax = np.split(chunk.absmax, np.cumsum(sizes[:-1]))
    return [Chunk(h, s, a) for h, s, a in zip(hidden, scales, absmax, strict=True)]


def _num_rows(job: Job) -> int:
    try:
        return len(job.selection.positions(job.num_states))
    except InvalidInputError:
        return 0
