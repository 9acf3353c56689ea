"""A bounded ring of reusable staging buffers: the only memory that hidden states take outside the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


class RingClosedError(Exception):
    """The ring was closed, or the wait was given up, before a buffer came free."""


class StagingRing:
    """``num_buffers`` buffers of ``chunk_bytes`` each, allocated when first needed, reused for ever.

    Args:
        num_buffers: how many buffers may be in use at once.
        chunk_bytes: size of one buffer.
        pinned: page-locked memory, for asynchronous copies from a GPU.
    """

    def __init__(self, num_buffers: int, chunk_bytes: int, pinned: bool = False) -> None:
        assert num_buffers > 0
        assert chunk_bytes > 0
        self.num_buffers = num_buffers
        self.chunk_bytes = chunk_bytes
        self.pinned = pinned
        self.in_use = 0
        self.high_water = 0
        """The most buffers that were ever in use at once."""
        self.wait_seconds = 0.0
        """Time that writers have spent waiting for a buffer."""
        self._free: list[torch.Tensor] = []
        self._allocated = 0
        self._closed = False
        self._changed = threading.Condition()

    def acquire(self, given_up: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """Take a buffer [chunk_bytes] uint8, waiting until one is free.

        Args:
            given_up: asked under the ring's lock whenever :meth:`wake` is called; True ends the wait.

        Raises:
            RingClosedError: the ring was closed or the wait given up.
        """
        with self._changed:
            if self.in_use >= self.num_buffers:
                start = time.monotonic()
                self._changed.wait_for(lambda: self.in_use < self.num_buffers or self._closed or given_up())
                self.wait_seconds += time.monotonic() - start
            if self._closed or given_up():
                raise RingClosedError
            return self._take()

    def try_acquire(self) -> torch.Tensor | None:
        """Take a buffer if one is free now."""
        with self._changed:
            if self._closed or self.in_use >= self.num_buffers:
                return None
            return self._take()

    def _take(self) -> torch.Tensor:
        if self._free:
            buffer = self._free.pop()
        else:
            buffer = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            self._allocated += 1
        self.in_use += 1
        self.high_water = max(self.high_water, self.in_use)
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Give a buffer back."""
        with self._changed:
            self.in_use -= 1
            if self._closed:
                self._allocated -= 1
            else:
                self._free.append(buffer)
            self._changed.notify()

    def wake(self) -> None:
        """Let every waiter ask again whether it has been given up."""
        with self._changed:
            self._changed.notify_all()

    @property
    def allocated_bytes(self) -> int:
        return self._allocated * self.chunk_bytes

    def close(self) -> None:
        """End all waits and let the memory go. Buffers in use go when they are released."""
        with self._changed:
            self._closed = True
            self._allocated -= len(self._free)
            self._free.clear()
            self._changed.notify_all()
