"""Records in the memory of this process, under ``memory://`` handles, until they are taken."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch

from layertap.errors import HandleNotFoundError
from layertap.record import HiddenStates, states_of
from layertap.sinks import native_files
from layertap.sinks.base import RecordSpec, RecordWriter, Sink
from layertap.sinks.record_memory import RecordMemory

SCHEME = "memory://"
_FOR_SEVERAL = 8 << 20  # bytes that are worth starting threads for
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Replaced as a whole under the lock, so that whoever looks for a handle needs none.
_live: tuple[weakref.ref[MemorySink], ...] = ()
_live_lock = threading.Lock()


class MemorySink(Sink):
    """Keeps records until :meth:`take` or :meth:`delete`. A later record of the same id replaces an earlier
    one.

    Args:
        threads: outside the interpreter, that copy a large record's rows together. One copies 1 to 5 GB/s
            into memory.
    """

    keeps_rows = True

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads if threads > 1 and native_files.library() is not None else 1
        self._records: dict[str, HiddenStates] = {}
        self._lock = threading.Lock()
        self._bytes = 0
        self.memory = RecordMemory()
        _register(self, True)

    def open(self, spec: RecordSpec) -> RecordWriter:
        return MemoryWriter(self, spec)

    def handle(self, request_id: str) -> str:
        return SCHEME + request_id

    @property
    def bytes(self) -> int:
        """Bytes of all records that wait to be taken."""
        return self._bytes

    def get(self, handle: str) -> HiddenStates:
        """The record of a handle; the sink keeps it.

        Raises:
            HandleNotFoundError: there is none (any more).
        """
        with self._lock:
            record = self._records.get(handle)
        if record is None:
            raise _not_found(handle)
        return record

    def take(self, handle: str) -> HiddenStates:
        """Hand a record out and forget it.

        Raises:
            HandleNotFoundError: there is none (any more).
        """
        record = self._pop(handle)
        if record is None:
            raise _not_found(handle)
        return record

    def delete(self, handle: str) -> bool:
        """Forget a record. True if there was one."""
        return self._pop(handle) is not None

    def _pop(self, handle: str) -> HiddenStates | None:
        with self._lock:
            record = self._records.pop(handle, None)
            if record is not None:
                self._bytes -= _size(record)
        return record

    def __contains__(self, handle: str) -> bool:
        return handle in self._records

    def _publish(self, handle: str, record: HiddenStates) -> None:
        size = _size(record)
        with self._lock:
            replaced = self._records.get(handle)
            self._records[handle] = record
            self._bytes += size - (0 if replaced is None else _size(replaced))

    def close(self) -> None:
        """Leave the registry of live sinks; records stay until the sink itself goes."""
        _register(self, False)
        self.memory.close()


class MemoryWriter(RecordWriter):
    """Fills tensors that are allocated whole at the first rows."""

    def __init__(self, sink: MemorySink, spec: RecordSpec) -> None:
        self._sink = sink
        self._spec = spec
        self._rows = 0
        self._hidden: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None

    def write(self, hidden_TLH: torch.Tensor, scales_T11: torch.Tensor | None = None) -> None:
        spec = self._spec
        if self._hidden is None:
            self._hidden = self._sink.memory.empty(spec.shape, spec.dtype)
            self._scales = torch.empty(spec.shape[0], 1, 1) if spec.has_scales else None
        rows = slice(self._rows, self._rows + hidden_TLH.shape[0])
        source, target = _bits(hidden_TLH), _bits(self._hidden[rows])
        if self._sink.threads > 1 and len(source) >= _FOR_SEVERAL:
            assert source.shape == target.shape
            native_files.copy(target.ctypes.data, source.ctypes.data, len(source), self._sink.threads)
        else:
            # Bytes through numpy: one memcpy without the GIL and without waking torch's thread pool.
            target[...] = source
        if scales_T11 is not None:
            assert self._scales is not None
            self._scales.numpy()[rows] = scales_T11.numpy()
        self._rows = rows.stop

    def keep(self, hidden_TLH: torch.Tensor, scales_T11: torch.Tensor | None = None) -> None:
        self._hidden, self._scales, self._rows = hidden_TLH, scales_T11, hidden_TLH.shape[0]

    def commit(self) -> str:
        assert self._hidden is not None
        assert self._rows == self._spec.shape[0], "commit before all rows were written"
        handle = self._sink.handle(self._spec.request_id)
        record = states_of(dict(self._spec.metadata), self._spec.token_ids, self._hidden, self._scales)
        record.request_id = self._spec.request_id
        self._sink._publish(handle, record)
        self.abort()
        return handle

    def abort(self) -> None:
        self._hidden = self._scales = None


def _bits(tensor: torch.Tensor) -> _Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _size(record: HiddenStates) -> int:
    tensors = (record.token_ids, record.hidden_states, record.scales)
    return sum(t.nbytes for t in tensors if t is not None)


def _not_found(handle: str) -> HandleNotFoundError:
    return HandleNotFoundError(f"{handle}: not in memory; it was never delivered, or has been taken already")


def _register(sink: MemorySink, live: bool) -> None:
    """Put a sink among the live ones or take it out; sinks that are gone go too."""
    global _live
    with _live_lock:
        others = tuple(ref for ref in _live if ref() not in (None, sink))
        _live = (*others, weakref.ref(sink)) if live else others


def find_sink(handle: str) -> MemorySink | None:
    """The live sink that holds a handle."""
    for ref in _live:
        sink = ref()
        if sink is not None and handle in sink:
            return sink
    return None
