"""Memory for records that is used again when nobody holds the record any more.

A new large tensor is pages that the system has yet to find and clear, which takes longer than copying into
them; and a program that takes record after record lets go of as much as it is given.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
import weakref
from collections import deque

import numpy as np
import torch

from layertap.engine.memory import machine_memory

_LEAST = 8 << 20
"""Smaller ones come from where other tensors come from."""
_LARGE_PAGE = 2 << 20
_WASTE = 4  # a block may be larger than what is put into it by a quarter
_MOST_KEPT = 4 << 30


class RecordMemory:
    """Tensors for records. Safe to use from any thread.

    What other processes are given of a tensor (``share_memory_``) is a copy: arrays that were made of the
    tensor before lose their memory then, here as elsewhere, and may show another record's.

    Args:
        most_kept: bytes that may lie here unused; None takes 4 GiB, and a sixteenth of a smaller machine's
            memory.
    """

    def __init__(self, most_kept: int | None = None) -> None:
        self._most_kept = min(_MOST_KEPT, machine_memory() // 16) if most_kept is None else most_kept
        self._lock = threading.Lock()
        self._free: deque[mmap.mmap] = deque()
        """The one that came back first is the first; changed under the lock."""
        # A record may go while this thread holds the lock: what comes back is left here, without one.
        self._returned: deque[mmap.mmap] = deque()
        self._closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie here unused."""
        with self._lock:
            self._settle()
            return sum(map(len, self._free))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it. Its memory comes back here when its last view is gone.

        Raises:
            RuntimeError: there is no memory.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < _LEAST or not sys.platform.startswith("linux"):
            return torch.empty(shape, dtype=dtype)
        block = self._take(size)
        if block is None:
            try:
                block = _new(size)
            except OSError:  # what lies here unused may be what is missing
                self.clear()
                return torch.empty(shape, dtype=dtype)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def clear(self) -> None:
        """Give back to the system what lies here unused."""
        with self._lock:
            self._free.clear()
            self._returned.clear()

    def close(self) -> None:
        """Keep nothing, now and later. Tensors that are out stay as they are."""
        self._closed = True
        self.clear()

    def _take(self, size: int) -> mmap.mmap | None:
        with self._lock:
            self._settle()
            most = size + size // _WASTE + _LARGE_PAGE
            fitting = [block for block in self._free if size <= len(block) <= most]
            best = min(fitting, key=len, default=None)
            if best is not None:
                self._free.remove(best)
        return best

    def _give_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        if self._closed:
            self._returned.clear()
        elif self._lock.acquire(blocking=False):  # whoever has it sees to it
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Take in what has come back, and let go of the oldest where it is too much. Under the lock."""
        while self._returned:
            self._free.append(self._returned.popleft())
        kept = sum(map(len, self._free))
        while kept > self._most_kept:
            kept -= len(self._free.popleft())


def _new(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, -(-size // _LARGE_PAGE) * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has none: small ones it is
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
