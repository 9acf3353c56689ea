"""Memory that a step frees on a CPU and the next step asks for again."""

from __future__ import annotations

import ctypes
import os

# glibc's numbers for what mallopt() sets, and the largest block that it lets the heap serve.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_HEAP_BLOCK = 32 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks of up to 32 MiB, at most 1 GiB of each heap, for the next step.

    By default it gives them back to the system: every activation of a step is then made of fresh pages,
    which the system has to clear and map (measured: docs/performance.md). What the user has set stays.

    Returns:
        Whether it was done: the C library is glibc, and neither ``MALLOC_...`` variables nor
        ``GLIBC_TUNABLES`` set anything of its allocator.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
