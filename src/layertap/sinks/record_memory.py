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
import time
import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from layertap.engine.memory import machine_memory

_LEAST = 8 << 20
"""Smaller ones come from where other tensors come from."""
_LARGE_PAGE = 2 << 20
_WASTE = 4  # a block may be larger than what is put into it by a quarter
_MOST_KEPT = 4 << 30
_LATELY = 60.0
"""Seconds."""


class RecordMemory:
    """Tensors for records. Safe to use from any thread.

    What other processes are given of a tensor (``share_memory_``) is a copy: arrays that were made of the
    tensor before lose their memory then, here as elsewhere, and may show another record's.

    With what is in use, no more is kept than records have been in use at once in the last minute. Of what is
    more than ``most_kept`` the system may take the memory where it needs some.

    Args:
        most_kept: bytes; None takes 4 GiB, and a sixteenth of a smaller machine's memory.
    """

    def __init__(self, most_kept: int | None = None) -> None:
        self._most_kept = min(_MOST_KEPT, machine_memory() // 16) if most_kept is None else most_kept
        self._lock = threading.Lock()
        self._free: deque[mmap.mmap] = deque()
        """The one that came back first is the first; changed under the lock."""
        self._lent: deque[mmap.mmap] = deque()
        """The same, of those that the system may take the memory of."""
        # A record may go while this thread holds the lock: what comes back is left here, without one.
        self._returned: deque[mmap.mmap] = deque()
        self._used = 0
        """Bytes in use."""
        self._most_used = 0
        """At once, lately."""
        self._most_used_at = 0.0
        """In seconds on ``time.monotonic()``'s clock."""
        self._closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie here unused."""
        with self._lock:
            unneeded = self._settle()
            kept = _bytes_of(self._free) + _bytes_of(self._lent)
        unneeded.clear()
        return kept

    @property
    def lent_bytes(self) -> int:
        """Those of them that the system may take."""
        with self._lock:
            return _bytes_of(self._lent)

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
            self._note_use(block)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def clear(self) -> None:
        """Give back to the system what lies here unused."""
        with self._lock:
            unneeded = [*self._settle(), *self._free, *self._lent]
            self._free.clear()
            self._lent.clear()
        unneeded.clear()

    def close(self) -> None:
        """Keep nothing, now and later. Tensors that are out stay as they are."""
        self._closed = True
        self.clear()

    def _take(self, size: int) -> mmap.mmap | None:
        with self._lock:
            unneeded = self._settle()
            most = size + size // _WASTE + _LARGE_PAGE
            best = None
            for blocks in (self._free, self._lent):
                fitting = (block for block in blocks if size <= len(block) <= most)
                best = min(fitting, key=len, default=None)
                if best is not None:
                    blocks.remove(best)
                    self._use(len(best))
                    break
        unneeded.clear()
        return best

    def _note_use(self, block: mmap.mmap) -> None:
        """Of one that did not lie here."""
        with self._lock:
            self._use(len(block))
            unneeded = self._settle()
        unneeded.clear()

    def _use(self, num_bytes: int) -> None:
        """Under the lock."""
        self._used += num_bytes
        now = time.monotonic()
        if self._used >= self._most_used or now - self._most_used_at > _LATELY:
            self._most_used, self._most_used_at = self._used, now

    def _give_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        if self._lock.acquire(blocking=False):  # whoever has it sees to it
            try:
                unneeded = self._settle()
            finally:
                self._lock.release()
            unneeded.clear()

    def _settle(self) -> list[mmap.mmap]:
        """Take in what has come back, and lend what is more than is kept for certain. Under the lock: a block
        that is lent must not be in use.

        Returns:
            What is too much, the oldest: to be let go of without the lock, as that takes a while.
        """
        while self._returned:
            block = self._returned.popleft()
            self._used -= len(block)
            self._free.append(block)
        most = 0 if self._closed else max(self._most_kept, self._most_used - self._used)
        unneeded = []
        kept = _bytes_of(self._free) + _bytes_of(self._lent)
        while kept > most:
            block = (self._lent or self._free).popleft()
            kept -= len(block)
            unneeded.append(block)
        certain = _bytes_of(self._free)
        while certain > self._most_kept:
            block = self._free.popleft()
            certain -= len(block)
            try:
                block.madvise(mmap.MADV_FREE)
            except OSError:  # this system has no such thing
                unneeded.append(block)
            else:
                self._lent.append(block)
        return unneeded


def _bytes_of(blocks: Iterable[mmap.mmap]) -> int:
    return sum(map(len, blocks))


def _new(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, -(-size // _LARGE_PAGE) * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has none: small ones it is
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
