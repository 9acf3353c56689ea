"""The life of stored records: room, age, reading and deleting, for the files that this kind of server writes.

Only files whose names a server made are counted, aged or served: the folder may hold others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from layertap.errors import InvalidInputError
from layertap.server.http_errors import ApiError
from layertap.sinks.file import SUFFIX

logger = logging.getLogger("layertap")

RECORD_ID = re.compile(r"(?:cmpl|chatcmpl)-[0-9a-f]{32}-\d{1,6}(?:-\d{1,6})?")
_EXTRA = "kv_transfer_config.kv_connector_extra_config"
_RESCAN_SECONDS = 0.2


def take_limits(extra: Mapping[str, Any]) -> tuple[dict[str, Any], int | None, float | None]:
    """Split ``ttl_seconds`` and ``max_bytes`` off a connector's extra config: they are the server's affair.

    Returns:
        The connector's part, ``max_bytes``, ``ttl_seconds``.

    Raises:
        InvalidInputError: one of them is no positive number.
    """
    rest = dict(extra)
    limits: dict[str, float | None] = {}
    for name in ("max_bytes", "ttl_seconds"):
        value = rest.pop(name, None)
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
        if value is not None and not right:
            raise InvalidInputError(f"{_EXTRA}.{name}", value, "a number above 0, or null for no limit")
        limits[name] = value
    most = limits["max_bytes"]
    return rest, None if most is None else int(most), limits["ttl_seconds"]


class Storage:
    """The folder that records lie in.

    A record of a request under way is counted by the room that is kept for it, from then on by its size; so
    scans leave out those that are, or were when they began, under way. Used on the event loop; only
    :meth:`read` and :meth:`delete` may run in other threads.

    Args:
        folder: of the file connector.
        max_bytes: records may take this much; None sets no limit.
        ttl_seconds: a record that nobody has read for so long is removed; None keeps all.
    """

    def __init__(self, folder: str, max_bytes: int | None = None, ttl_seconds: float | None = None) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.ttl_seconds = ttl_seconds
        self.expired = 0
        self._scanned = 0
        self._since_scan = 0
        self._reserved = 0
        self._scan_time = float("-inf")
        self._scanning = asyncio.Lock()
        self._under_way: set[str] = set()
        self._left_out: set[str] | None = None
        """Records that the scan under way does not count; None between scans."""
        self._deleted_meanwhile = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all records, as far as is known without looking."""
        return self._scanned + self._since_scan

    async def reserve(self, num_bytes: int, record_ids: Collection[str] = ()) -> None:
        """Keep room for records that are to be written.

        Raises:
            ApiError: 507, the storage is full.
        """
        if not self._has_room(num_bytes):
            async with self._scanning:
                if time.monotonic() - self._scan_time > _RESCAN_SECONDS:
                    await self._scan()
            if not self._has_room(num_bytes):
                raise ApiError(
                    507,
                    f"the storage is full: {self.used_bytes + self._reserved} of {self.max_bytes} bytes "
                    f"(max_bytes) are taken, this request needs {num_bytes}; delete records that were read",
                    code="storage_full",
                )
        self._reserved += num_bytes
        self._under_way.update(record_ids)
        if self._left_out is not None:
            self._left_out.update(record_ids)

    def _has_room(self, num_bytes: int) -> bool:
        if self.max_bytes is None or num_bytes == 0:
            return True
        return self.used_bytes + self._reserved + num_bytes <= self.max_bytes

    def release(self, num_bytes: int, record_ids: Iterable[str] = ()) -> None:
        """A reservation ends, and with it the writing of some of its records: what there is of them counts
        now."""
        self._reserved -= num_bytes
        for record_id in record_ids:
            self._under_way.remove(record_id)
            self._since_scan += self._size(record_id)

    async def sweep_forever(self) -> None:
        """Age records out, and keep count of them, until cancelled."""
        while True:
            pause = 30.0 if self.ttl_seconds is None else min(30.0, max(0.05, self.ttl_seconds / 4))
            try:
                async with self._scanning:
                    await self._scan()
            except OSError as e:
                logger.warning("the storage folder %s cannot be read: %s", self.folder, e)
            await asyncio.sleep(pause)

    async def _scan(self) -> None:
        before = self._since_scan
        self._left_out = set(self._under_way)
        self._deleted_meanwhile = False
        try:
            self._scanned = await asyncio.to_thread(self._look, self._left_out)
        finally:
            self._left_out = None
        self._since_scan -= before
        # What was deleted meanwhile may have been counted: nobody is refused before another look.
        self._scan_time = float("-inf") if self._deleted_meanwhile else time.monotonic()

    def _look(self, left_out: Set[str]) -> int:
        """Remove what is too old; count the rest."""
        total = 0
        now = time.time()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                record_id = entry.name.removesuffix(SUFFIX)
                if record_id == entry.name or not RECORD_ID.fullmatch(record_id) or record_id in left_out:
                    continue
                with contextlib.suppress(FileNotFoundError):  # taken by its reader meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    # The access time of a file system that keeps one says when it was read last.
                    idle = now - max(stat.st_mtime, stat.st_atime)
                    if self.ttl_seconds is not None and idle > self.ttl_seconds:
                        os.unlink(entry.path)
                        self.expired += 1
                    else:
                        total += stat.st_size
        return total

    def _path(self, record_id: str) -> str:
        if not RECORD_ID.fullmatch(record_id):
            raise _unknown(record_id)
        return f"{self.folder}/{record_id}{SUFFIX}"

    def _size(self, record_id: str) -> int:
        """Bytes of a record's file; 0 where there is none (any more)."""
        try:
            return os.stat(self._path(record_id), follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def open(self, record_id: str) -> tuple[int, int]:
        """A descriptor for a record's file, and its size. The caller closes it.

        Raises:
            ApiError: 404, there is none.
        """
        try:
            fd = os.open(self._path(record_id), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise _unknown(record_id) from None
        return fd, os.fstat(fd).st_size

    def read(self, record_id: str) -> bytes:
        """A record's file, whole."""
        fd, size = self.open(record_id)
        with os.fdopen(fd, "rb") as file:
            return file.read(size)

    def delete(self, record_id: str) -> bool:
        """Remove a record. False: there was none."""
        path = self._path(record_id)
        try:
            size = os.stat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return False
        if record_id in self._under_way:
            return True  # was never counted
        if self._left_out is not None:
            self._deleted_meanwhile = True
        else:
            self._since_scan -= size
        return True


def _unknown(record_id: str) -> ApiError:
    return ApiError(
        404,
        f"no hidden states are stored under {record_id!r}: expired, deleted, or never stored",
        code="not_found",
    )


def record_id_of(path: str) -> str:
    """The id in ``/v1/hidden_states/{id}`` for a stored file."""
    return os.path.basename(path).removesuffix(SUFFIX)
