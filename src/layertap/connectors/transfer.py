"""One job's way through a writer thread: chunk by chunk from the cache to a sink's writer, checked on the
way.

Shapes: T kept tokens, n rows of a chunk, L kept layers, H hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from layertap.connectors.gather import Array, Chunk, Gather
from layertap.connectors.job import Job
from layertap.connectors.staging import RingClosedError, StagingRing
from layertap.errors import ExtractionError
from layertap.layers import ServedLayers
from layertap.record import build_metadata
from layertap.selection import Selection
from layertap.sinks.base import RecordSpec, RecordWriter, Sink, WholeRecord

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_log = logging.getLogger(__name__)
_NO_SLOTS: Array = np.empty(0, dtype=np.int64)
_FEW_ROWS = 16  # up to here plain integers cost less than arrays


class Cancelled(Exception):  # noqa: N818 - an outcome, not a fault
    """The job was given up before its record was published."""


def storage_dtype(selection: Selection, cache_dtype: torch.dtype) -> torch.dtype:
    """What a record's states are stored in."""
    return cache_dtype if selection.dtype == "auto" else _DTYPES[selection.dtype]


def row_bytes(selection: Selection, gather: Gather) -> int:
    """What one token's states take in a staging buffer."""
    itemsize = max(storage_dtype(selection, gather.dtype).itemsize, gather.dtype.itemsize)
    return len(selection.columns) * gather.hidden_size * itemsize


def acquire(ring: StagingRing, given_up: Callable[[], bool]) -> torch.Tensor:
    """A staging buffer, once there is one.

    Raises:
        Cancelled: whoever wants it was given up.
    """
    try:
        return ring.acquire(given_up)
    except RingClosedError:
        raise Cancelled from None


def slots_of(positions: Sequence[int], block_ids: Sequence[int], block_size: int) -> Array:
    """[T] int64: where a sequence's tokens lie in the cache."""
    if len(positions) <= _FEW_ROWS:
        slots = [block_ids[p // block_size] * block_size + p % block_size for p in positions]
        return np.array(slots, dtype=np.int64)
    if isinstance(positions, range):
        positions_T = np.arange(positions.start, positions.stop)
    else:
        positions_T = np.asarray(positions, dtype=np.int64)
    block_T, offset_T = np.divmod(positions_T, block_size)
    slots_T: Array = np.asarray(block_ids, dtype=np.int64)[block_T] * block_size + offset_T
    return slots_T


def all_sound(absmax_nL: Array, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """True if rows of any number of jobs need no closer look: all values are finite and fit the storage
    dtype, and no token's layer is zero."""
    # NaN compares false.
    return bool(absmax_nL.min() > 0 and absmax_nL.max() < np.inf) and not _may_overflow(dtype, cache_dtype)


def _may_overflow(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).max < torch.finfo(cache_dtype).max and dtype != torch.float8_e4m3fn


class Transfer:
    """Moves one job: ``prepare``; ``open``; ``move``, or ``put`` with rows that were gathered for several
    jobs at once; ``check_whole``; ``commit``. After any of them has raised: ``abort``."""

    def __init__(self, job: Job, gather: Gather, sink: Sink, given_up: Callable[[], bool]) -> None:
        self._job = job
        self._gather = gather
        self._sink = sink
        self._given_up = given_up
        self._spec: RecordSpec | None = None
        self._writer: RecordWriter | None = None
        self._kept: Sequence[int] = ()
        """Positions of the kept rows, in output order."""
        self.slots_T: Array = _NO_SLOTS
        """Where the kept rows lie in the cache; known after ``prepare``, as is the record's ``dtype``."""
        self.dtype = gather.dtype
        self._largest_L: Array | None = None
        self.num_rows = 0
        self.num_bytes = 0
        self.gather_seconds = 0.0
        """Waiting for rows to be in staging buffers; on a CPU, copying them there."""
        self.write_seconds = 0.0
        """In the sink: hashing, writing, publishing."""

    def prepare(self, model: str, layers: ServedLayers) -> None:
        """Find out which rows are kept.

        Raises:
            Cancelled: the job was given up.
            InvalidInputError: the selection does not fit the sequence.
        """
        if self._given_up():
            raise Cancelled
        job, gather, selection = self._job, self._gather, self._job.selection
        self.dtype = storage_dtype(selection, gather.dtype)
        kept = self._kept = selection.positions(job.num_states)
        if isinstance(kept, range):
            tokens = np.array(job.token_ids[kept.start : kept.stop], dtype=np.int64)
        else:
            tokens = np.asarray(job.token_ids, dtype=np.int64)[list(kept)]
        metadata = build_metadata(
            request_id=job.request_id,
            model=model,
            layer_ids=selection.layer_ids,
            num_hidden_layers=layers.num_hidden_layers,
            storage_dtype=self.dtype,
            num_prompt_tokens=job.num_prompt_tokens,
            num_tokens=job.num_states,
            positions=kept,
        )
        self._spec = RecordSpec(
            request_id=job.request_id,
            token_ids=torch.from_numpy(tokens),
            shape=(len(kept), len(selection.columns), gather.hidden_size),
            dtype=self.dtype,
            has_scales=self.dtype == torch.float8_e4m3fn,
            metadata=metadata,
        )
        self.slots_T = slots_of(kept, job.block_ids, gather.block_size)

    def open(self) -> None:
        """Open the sink's writer for them.

        Raises:
            Cancelled: the job was given up.
            Exception: whatever the sink raises.
        """
        if self._given_up():
            raise Cancelled
        assert self._spec is not None
        self._writer = self._sink.open(self._spec)

    def move(self, ring: StagingRing, ready: Collection[Any], copied: Callable[[], None]) -> None:
        """Take all rows through staging buffers of this job's own, chunk by chunk.

        Args:
            ready: see :meth:`Gather.start`.
            copied: called once the last row is out of the cache.

        Raises:
            ExtractionError: the states are not fit to be published.
            Cancelled: the job was given up.
            Exception: whatever the sink raises.
        """
        columns = self._job.selection.columns
        step = ring.chunk_bytes // row_bytes(self._job.selection, self._gather)
        if step == 0:
            raise ExtractionError(
                self._job.request_id,
                f"one token's states take more than a staging buffer's {ring.chunk_bytes} bytes; "
                "raise staging_chunk_bytes",
            )
        pieces = [self.slots_T[i : i + step] for i in range(0, len(self.slots_T), step)]
        waiting = iter(pieces)
        held: list[torch.Tensor] = []  # staging buffers, in the order of their chunks
        started: list[Any] = []

        def start(buffer: torch.Tensor) -> None:
            held.append(buffer)
            started.append(self._gather.start(next(waiting), columns, self.dtype, buffer, ready))

        try:
            for i in range(len(pieces)):
                buffer = None if started else acquire(ring, self._given_up)
                begun = time.monotonic()
                if buffer is not None:
                    start(buffer)
                if self._gather.runs_ahead and i + 1 < len(pieces):
                    spare = ring.try_acquire()
                    if spare is not None:
                        start(spare)
                chunk = self._gather.finish(started.pop(0))
                self.gather_seconds += time.monotonic() - begun
                if i + 1 == len(pieces):
                    copied()
                self.put(chunk)
                ring.release(held.pop(0))
        finally:
            # After a failure: copies that still run must end before their buffers are used again.
            for copy in started:
                self._gather.finish(copy)
            for buffer in held:
                ring.release(buffer)

    def put(self, chunk: Chunk, sound: bool = False, own: bool = False) -> None:
        """Check the next rows, and write them.

        Args:
            sound: they have been checked, all of them (see :func:`all_sound`).
            own: they are all that there are, and the sink may keep their memory.

        Raises:
            ExtractionError: they are not fit to be published.
            Cancelled: the job was given up.
            Exception: whatever the sink raises.
        """
        assert self._writer is not None
        self._admit(chunk, sound)
        begun = time.monotonic()
        (self._writer.keep if own else self._writer.write)(chunk.hidden, chunk.scales)
        self.write_seconds += time.monotonic() - begun

    def whole(self, chunk: Chunk, sound: bool) -> WholeRecord:
        """All rows at once, checked, for :meth:`Sink.publish`.

        Raises:
            ExtractionError: they are not fit to be published.
            Cancelled: the job was given up.
        """
        assert self._spec is not None
        self._admit(chunk, sound)
        self.check_whole()
        return WholeRecord(self._spec, chunk.hidden, chunk.scales)

    def _admit(self, chunk: Chunk, sound: bool) -> None:
        """Check the next rows, and count them."""
        if not sound:
            self._check(chunk, self._kept[self.num_rows :], self.dtype)
        if self._given_up():
            raise Cancelled
        self.num_rows += chunk.hidden.shape[0]
        self.num_bytes += chunk.hidden.numel() * self.dtype.itemsize

    def check_whole(self) -> None:
        """All rows have been put.

        Raises:
            ExtractionError: a layer is zero for every kept token.
        """
        assert self.num_rows == len(self._kept)
        if self._largest_L is not None and self._largest_L.min() == 0:
            layer_id = self._job.selection.layer_ids[int(self._largest_L.argmin())]
            reason = (
                f"the hidden states of layer {layer_id} are zero for every kept token; nothing was published"
            )
            raise ExtractionError(self._job.request_id, reason, "all_zero")

    def commit(self) -> str:
        """Publish the record and return its handle."""
        assert self._writer is not None
        begun = time.monotonic()
        try:
            return self._writer.commit()
        finally:
            self.write_seconds += time.monotonic() - begun

    def abort(self) -> None:
        """Leave nothing behind."""
        if self._writer is None:
            return
        try:
            self._writer.abort()
        except Exception:  # noqa: BLE001 - logged; the request has failed already
            _log.exception("request %s: its unfinished record could not be removed", self._job.request_id)

    def _check(self, chunk: Chunk, positions: Sequence[int], dtype: torch.dtype) -> None:
        absmax_nL = chunk.absmax
        largest_L = absmax_nL.max(axis=0)
        if not largest_L.max() < np.inf:  # NaN too
            self._refuse(
                ~np.isfinite(absmax_nL), positions, "not_finite", "NaN or infinite; nothing was published"
            )
        if _may_overflow(dtype, self._gather.dtype):
            with np.errstate(over="ignore"):
                stored = torch.from_numpy(absmax_nL).to(dtype).float().numpy()
            if not np.isfinite(stored).all():
                name = str(dtype).removeprefix("torch.")
                self._refuse(
                    ~np.isfinite(stored),
                    positions,
                    "dtype_overflow",
                    f"too large for {name}; ask for another dtype",
                )
        self._largest_L = largest_L if self._largest_L is None else np.maximum(self._largest_L, largest_L)

    def _refuse(self, bad_nL: Array, positions: Sequence[int], kind: str, what: str) -> None:
        row, column = (int(i) for i in np.argwhere(bad_nL)[0])
        layer_id = self._job.selection.layer_ids[column]
        reason = f"the hidden states of layer {layer_id} at position {positions[row]} are {what}"
        raise ExtractionError(self._job.request_id, reason, kind)
