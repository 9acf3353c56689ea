"""``record_files.cpp`` from Python: records that are whole in memory become files in one call, and large ones
are copied by several threads."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from layertap import native

logger = logging.getLogger("layertap")

_SOURCE = Path(__file__).with_name("record_files.cpp")
_FLAGS = ("-O2", "-std=gnu++17", "-pthread", "-fPIC", "-shared")
_SAMPLE = bytes(range(256)) * 5
_TEXTS = ("temporary", "final", "front", "data")
_NUMBERS = ("front_bytes", "data_bytes", "checksum_at", "needs_space", "sync", "error")


class _Record(ctypes.Structure):
    """``struct Record`` of the C++ side, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TEXTS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file that is complete in memory."""

    temporary: str
    final: str
    front: bytearray
    """Everything before the data."""
    checksum_at: int
    """Where in ``front`` the checksum of the data goes: 16 hexadecimal digits of its 64-bit xxh3."""
    data: int
    """Address of the data; it must stay until the call returns."""
    data_bytes: int
    needs_space: bool
    """Ask the file system first whether it fits."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they cannot be had. The reason is logged once."""
    if sys.platform != "linux" or _hash() is None:
        return None
    return native.build(_SOURCE, (), _FLAGS, "records are moved by the interpreter's threads")


@functools.cache
def _hash() -> ctypes.c_void_p | None:
    """xxh3 as a C function, of the package that hashes for us everywhere."""
    try:
        function = ctypes.CDLL(xxhash._xxhash.__file__).XXH3_64bits  # type: ignore[attr-defined]
    except (AttributeError, OSError) as error:
        logger.info("xxhash's function cannot be called from C: %s", error)
        return None
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint64
    if function(_SAMPLE, len(_SAMPLE)) != xxhash.xxh3_64_intdigest(_SAMPLE):
        return None
    return ctypes.cast(function, ctypes.c_void_p)


def publish(files: Sequence[WholeFile], threads: int, sync: bool) -> list[int]:
    """Write files under their temporary names and rename them, all in one call without the interpreter.

    Args:
        threads: that write at the same time, at most.
        sync: flush each file before it is renamed.

    Returns:
        For each file 0, or the ``errno`` of what failed; nothing of it is left then.
    """
    loaded = library()
    assert loaded is not None
    records = (_Record * len(files))()
    kept = []
    for record, file in zip(records, files, strict=True):
        names = [ctypes.c_char_p(os.fsencode(name)) for name in (file.temporary, file.final)]
        front = ctypes.c_char.from_buffer(file.front)
        kept.append((names, front))
        record.temporary, record.final = (ctypes.cast(name, ctypes.c_void_p) for name in names)
        record.front, record.front_bytes = ctypes.addressof(front), len(file.front)
        record.data, record.data_bytes = file.data, file.data_bytes
        record.checksum_at, record.needs_space, record.sync = file.checksum_at, file.needs_space, sync
    loaded.layertap_publish(records, ctypes.c_int64(len(files)), ctypes.c_int64(threads), _hash())
    return [record.error for record in records]


def copy(target: int, source: int, num_bytes: int, threads: int) -> None:
    """Copy memory from one address to another, in one call without the interpreter.

    Args:
        threads: that copy at the same time, at most.
    """
    loaded = library()
    assert loaded is not None
    addresses = (ctypes.c_void_p(address) for address in (target, source))
    loaded.layertap_copy(*addresses, ctypes.c_int64(num_bytes), ctypes.c_int64(threads))


def lock(pairs: Sequence[tuple[str, str]]) -> list[int]:
    """For each pair remove the first path, if it is there, and take an exclusive ``flock`` on a file under
    the second.

    Returns:
        For each pair the open file's descriptor, or the negative ``errno`` of what failed.
    """
    loaded = library()
    assert loaded is not None
    count = len(pairs)
    removed, locked = ((ctypes.c_char_p * count)(*(os.fsencode(pair[i]) for pair in pairs)) for i in (0, 1))
    files = (ctypes.c_int64 * count)()
    loaded.layertap_lock(removed, locked, files, ctypes.c_int64(count))
    return list(files)


def close(files: Sequence[int]) -> None:
    """Close open files, in one call."""
    loaded = library()
    assert loaded is not None
    loaded.layertap_close((ctypes.c_int64 * len(files))(*files), ctypes.c_int64(len(files)))
