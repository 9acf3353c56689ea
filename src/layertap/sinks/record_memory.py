"""Memory for records that is used again when nobody holds the record any more.

A new large tensor is pages that the system has yet to find and clear, which takes longer than copying into
them; and a program that takes record after record lets go of as much as it is given.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import threading
import weakref
from collections import deque

import numpy as np
import torch

_LEAST = 8 << 20
"""Smaller ones come from where other tensors come from."""
_LARGE_PAGE = 2 << 20
_WASTE = 4  # a block may be larger than what is put into it by a quarter
_MOST_KEPT = 4 << 30


class RecordMemory:
    """Tensors for records. Safe to use from any thread.

    Args:
        most_kept: bytes that may lie here unused; None takes 4 GiB, and a sixteenth of a smaller machine's
            memory.
    """

    def __init__(self, most_kept: int | None = None) -> None:
        self._most_kept = _default() if most_kept is None else most_kept
        self._lock = threading.Lock()
        self._free: deque[mmap.mmap] = deque()
        # A record may go while this thread holds the lock: what comes back is left here, without one.
        self._returned: deque[mmap.mmap] = deque()
        self.closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie here unused."""
        return sum(len(block) for blocks in (self._free, self._returned) for block in tuple(blocks))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it. Its memory comes back here when its last view is gone."""
        count = functools.reduce(lambda a, b: a * b, shape, 1)
        size = count * dtype.itemsize
        if size < _LEAST or not sys.platform.startswith("linux"):
            return torch.empty(shape, dtype=dtype)
        block = self._take(size) or _new(size)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def close(self) -> None:
        """Keep nothing, now and later. Tensors that are out stay as they are."""
        self.closed = True
        self._returned.clear()
        with self._lock:
            self._free.clear()

    def _take(self, size: int) -> mmap.mmap | None:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            most = size + size // _WASTE + _LARGE_PAGE
            fitting = [block for block in self._free if size <= len(block) <= most]
            if not fitting:
                return None
            best = min(fitting, key=len)
            self._free.remove(best)
            return best

    def _give_back(self, block: mmap.mmap) -> None:
        if self.closed:
            return
        self._returned.append(block)
        while self._returned and self.kept_bytes > self._most_kept:
            try:
                self._returned.popleft()
            except IndexError:  # another thread was faster
                break


def _new(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, -(-size // _LARGE_PAGE) * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has none: small ones it is
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _default() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_MOST_KEPT, machine // 16)
