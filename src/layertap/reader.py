"""From a handle to tensors: wait, open, delete; blocking and asynchronous.

Handles are paths, or ``memory://`` names of this process. Where vLLM writes the file, its answer may come
before the file does: then ``<path>.lock`` is held by the writer until the file is complete, and a failure is
told in ``<path>.error``. A file without a lock file is complete as soon as it is there.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from pathlib import Path

from layertap.errors import ExtractionError, HandleNotFoundError
from layertap.record import HiddenStates, read_record
from layertap.sinks.memory import SCHEME, find_sink

LOCK_SUFFIX = ".lock"
ERROR_SUFFIX = ".error"
DEFAULT_TIMEOUT = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def open(
    handle: str | os.PathLike[str], timeout: float = DEFAULT_TIMEOUT, verify: bool = True
) -> HiddenStates:
    """Read a record, waiting up to ``timeout`` seconds for it to be complete.

    Args:
        handle: what ``kv_transfer_params`` gave.
        verify: check the file's checksums.

    Raises:
        HandleNotFoundError: it did not appear, or its writer did not let go of it, in time.
        ExtractionError: the writer left word that it failed.
        CorruptRecordError: the file is cut off or damaged.
    """
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        record = _try_open(handle, verify)
        if record is not None:
            return record
        left = deadline - time.monotonic()
        if left <= 0:
            raise _not_found(handle, timeout)
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def take(handle: str) -> HiddenStates:
    """Read a record that is known to be complete; one in memory is forgotten by its sink, a file stays.

    Raises:
        HandleNotFoundError: there is none (any more).
    """
    if handle.startswith(SCHEME):
        sink = find_sink(handle)
        if sink is None:
            raise HandleNotFoundError(
                f"{handle}: not in memory; it was never delivered, or has been taken already"
            )
        return sink.take(handle)
    return open(handle, timeout=0, verify=False)


async def aopen(
    handle: str | os.PathLike[str], timeout: float = DEFAULT_TIMEOUT, verify: bool = True
) -> HiddenStates:
    """:func:`open` for asynchronous callers: waiting takes no thread, reading takes one for as long as it
    lasts."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        record = await asyncio.to_thread(_try_open, handle, verify)
        if record is not None:
            return record
        left = deadline - time.monotonic()
        if left <= 0:
            raise _not_found(handle, timeout)
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def exists(handle: str | os.PathLike[str]) -> bool:
    """Whether a record is complete and readable now."""
    name = os.fspath(handle)
    if name.startswith(SCHEME):
        return find_sink(name) is not None
    fd = _lock_if_free(name)
    if fd is None:
        return False
    try:
        return os.path.exists(name)
    finally:
        if fd >= 0:
            os.close(fd)


def delete(handle: str | os.PathLike[str]) -> bool:
    """Remove a record, and the lock and error files beside it. True if there was one."""
    name = os.fspath(handle)
    if name.startswith(SCHEME):
        sink = find_sink(name)
        return sink is not None and sink.delete(name)
    found = True
    try:
        os.unlink(name)
    except FileNotFoundError:
        found = False
    for suffix in (LOCK_SUFFIX, ERROR_SUFFIX):
        Path(name + suffix).unlink(missing_ok=True)
    return found


async def adelete(handle: str | os.PathLike[str]) -> bool:
    """:func:`delete` for asynchronous callers."""
    return await asyncio.to_thread(delete, handle)


def _try_open(handle: str | os.PathLike[str], verify: bool) -> HiddenStates | None:
    name = os.fspath(handle)
    if name.startswith(SCHEME):
        sink = find_sink(name)
        try:
            return None if sink is None else sink.get(name)
        except HandleNotFoundError:
            return None
    error = read_error(name)
    if error is not None:
        raise error
    fd = _lock_if_free(name)
    if fd is None:
        return None
    try:
        return read_record(name, verify)
    except FileNotFoundError:
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def read_error(name: str) -> ExtractionError | None:
    """The word that a writer left in ``<path>.error``: the reason in the first line, its kind in the
    second."""
    try:
        lines = Path(name + ERROR_SUFFIX).read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return None
    request_id = Path(name).name.removesuffix(".safetensors")
    reason = lines[0] if lines else "the writer failed and left no reason"
    return ExtractionError(request_id, reason, lines[1].strip() if len(lines) > 1 else "storage")


def _lock_if_free(name: str) -> int | None:
    """A descriptor that holds the file's lock, -1 where no lock is needed, None while the writer holds it.

    The lock file is opened read-write: network file systems grant no lock on a read-only descriptor.
    """
    try:
        fd = os.open(name + LOCK_SUFFIX, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        os.close(fd)
        if error.errno in _NO_LOCKS:
            return -1
        raise
    return fd


def _not_found(handle: str | os.PathLike[str], timeout: float) -> HandleNotFoundError:
    name = os.fspath(handle)
    if name.startswith(SCHEME):
        return HandleNotFoundError(
            f"{name}: not in this process's memory after {timeout:g} s; memory handles are readable only in "
            "the process that extracted them, until they are taken or deleted"
        )
    if os.path.exists(name + LOCK_SUFFIX) and _still_locked(name):
        return HandleNotFoundError(
            f"{name}: its writer still holds {name}{LOCK_SUFFIX} after {timeout:g} s; wait longer"
        )
    return HandleNotFoundError(
        f"{name}: no such file after {timeout:g} s; check that this machine sees the storage folder and that "
        "the request succeeded, or wait longer (timeout)"
    )


def _still_locked(name: str) -> bool:
    fd = _lock_if_free(name)
    if fd is not None and fd >= 0:
        os.close(fd)
    return fd is None
