"""How a reader learns that a file is complete: vLLM's ``<path>.lock`` protocol, and ``<path>.error``.

vLLM answers a request before its file is complete. So from the request's first step on, long before the
answer, the worker holds an exclusive ``flock`` on ``<path>.lock``, and lets go of it once the file has its
final name. After a failure ``<path>.error`` holds the reason in its first line and the kind of
:class:`~layertap.errors.ExtractionError` in its second, and is there before the lock is released. The lock
file stays (vLLM's own readers open it); whoever deletes the record deletes it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from pathlib import Path

from layertap.reader import ERROR_SUFFIX, LOCK_SUFFIX
from layertap.sinks import native_files

logger = logging.getLogger(__name__)

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Publication:
    """The locks of the requests under way. Safe to call from several threads.

    Args:
        use_locks: False makes no lock files: for readers that start after the engine is done.
    """

    def __init__(self, use_locks: bool = True) -> None:
        self.use_locks = use_locks
        if use_locks:
            native_files.library()  # compiled here, and not in a step
        self._fds: dict[str, int | None] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._fds)

    def begin(self, *paths: str) -> None:
        """Take the locks of paths, and forget what earlier requests of their names left there. Never raises:
        a storage that takes no lock takes no file either, and that is told when the file is written."""
        with self._guard:
            new = [path for path in dict.fromkeys(paths) if path not in self._fds]
            self._fds.update(dict.fromkeys(new))
            if new and self.use_locks and native_files.library() is not None:
                # In one call: this is the thread that launches the model, and each that gives the
                # interpreter away waits to have it back.
                fds = native_files.lock([(path + ERROR_SUFFIX, path + LOCK_SUFFIX) for path in new])
                self._fds.update((path, fd) for path, fd in zip(new, fds, strict=True) if fd >= 0)
                new = [path for path, fd in zip(new, fds, strict=True) if fd < 0]
            for path in new:
                self._begin(path)

    def _begin(self, path: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + ERROR_SUFFIX)
            if self.use_locks:
                self._fds[path] = _locked(path + LOCK_SUFFIX)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            logger.error("%s: no lock (%s)", path, error)

    def publish(self, *paths: str) -> None:
        """The files are complete under their names."""
        self._let_go(*paths)

    def fail(self, path: str, reason: str, kind: str) -> None:
        """Nothing will come: leave the reason where a reader looks for it."""
        line = " ".join(reason.split())
        logger.error("%s: %s", path, line)
        temporary = f"{path}{ERROR_SUFFIX}.{os.getpid()}.tmp"
        try:
            # A full device may still take a name, if not the text: an empty file also says that it failed.
            try:
                Path(temporary).write_text(f"{line}\n{kind}\n")
            finally:
                os.replace(temporary, path + ERROR_SUFFIX)
        except OSError as error:
            logger.error("%s: its error file could not be written (%s)", path, error)
        self._let_go(path)

    def drop(self, path: str) -> None:
        """The request was aborted: leave nothing."""
        if self.use_locks:
            Path(path + LOCK_SUFFIX).unlink(missing_ok=True)
        self._let_go(path)

    def close(self) -> None:
        """Let go of every lock."""
        self._let_go(*self._fds)

    def _let_go(self, *paths: str) -> None:
        with self._guard:
            held = [fd for path in paths if (fd := self._fds.pop(path, None)) is not None]
        if len(held) > 1 and native_files.library() is not None:
            native_files.close(held)
        else:
            for fd in held:
                os.close(fd)


def _locked(path: str) -> int:
    try:
        fd = os.open(path, _LOCK_FLAGS, 0o666)
    except FileNotFoundError:  # somebody has taken the folder away
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, _LOCK_FLAGS, 0o666)
    try:
        # Readers hold it shared, and only for as long as they look; a new file's lock is free.
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        os.close(fd)
        raise
    return fd
