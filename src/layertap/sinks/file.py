"""Records as safetensors files: streamed under a temporary name, renamed when complete.

Nothing partial is ever seen under a final name. Temporary files carry the token of the sink that writes them,
and the sink holds a lock on a file of that token as long as it lives: a token whose lock can be taken belongs
to a dead process, and its files are removed by the next sink that opens the folder.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import xxhash

from layertap.errors import InvalidInputError
from layertap.layout import HIDDEN_STATES, SCALES, TOKEN_IDS, RecordLayout
from layertap.sinks import native_files
from layertap.sinks.base import RecordSpec, RecordWriter, Sink, WholeRecord

SUFFIX = ".safetensors"
REQUEST_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,199}")
_TEMPORARY = re.compile(r"\.layertap-(\d+-[0-9a-f]{16})(?:-\d+\.tmp|\.lock)")
# Hashed and then written: while still in the processor's cache, yet with few returns to the interpreter.
_PIECE = 8 << 20
_ASK_FOR_SPACE = 1 << 20  # records from this size up ask the file system first whether they fit


class FileSink(Sink):
    """Writes ``{storage_path}/{request_id}.safetensors``.

    Args:
        storage_path: the folder; made if it is missing.
        fsync: flush each file to the device before it gets its final name, and the folder after it.
        helpers: threads that write parts of large records beside the one that brings them. One thread copies
            1 to 2 GB/s into memory files; a long prompt's record is larger than that.
        threads: outside the interpreter, that write several whole records at once; 0: one record after the
            other is written. Whoever needs the interpreter beside the writers (an engine that launches small
            steps) gets it back sooner.

    Raises:
        InvalidInputError: the folder cannot be made or written.
    """

    def __init__(
        self, storage_path: str | os.PathLike[str], fsync: bool = False, helpers: int = 0, threads: int = 0
    ) -> None:
        self._threads = threads if threads and native_files.library() is not None else 0
        self._helpers = ThreadPoolExecutor(helpers, "layertap-helper") if helpers else None
        self.storage_path = Path(storage_path).absolute()
        self.fsync = fsync
        self._numbers = itertools.count()
        self._token = f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self.storage_path.mkdir(parents=True, exist_ok=True)
            self._lock_path = self.storage_path / f".layertap-{self._token}.lock"
            lock_fd = _hold_lock(self._lock_path)
        except OSError as error:
            raise InvalidInputError(
                "shared_storage_path", str(storage_path), f"a folder that can be written ({error.strerror})"
            ) from None
        self._finalizer = weakref.finalize(self, _let_go, lock_fd, self._lock_path, os.getpid())
        remove_orphans(self.storage_path)

    def open(self, spec: RecordSpec) -> RecordWriter:
        """Start a file.

        Raises:
            InvalidInputError: the request id is not a plain file name.
            OSError: the file cannot be made, or the file system has no room for it.
        """
        final = self.handle(spec.request_id)
        return FileWriter(spec, final, self._temporary(), self.fsync, self._helpers)

    def _temporary(self) -> str:
        return f"{self.storage_path}/.layertap-{self._token}-{next(self._numbers)}.tmp"

    @property
    def publishes_together(self) -> bool:
        return self._threads > 0

    def publish(self, records: Sequence[WholeRecord]) -> list[str | Exception]:
        results: list[str | Exception] = []
        files: dict[int, native_files.WholeFile] = {}
        for i, record in enumerate(records):
            try:
                files[i] = self._file(record)
                results.append(files[i].final)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are written
                results.append(error)
        errors = native_files.publish(list(files.values()), self._threads, self.fsync)
        for (i, file), code in zip(files.items(), errors, strict=True):
            if code:
                results[i] = OSError(code, os.strerror(code), file.final)
        named = [result for result in results if isinstance(result, str)]
        if self.fsync and named:
            try:
                _sync_names(named)
            except OSError as error:
                return [error if isinstance(result, str) else result for result in results]
        return results

    def _file(self, record: WholeRecord) -> native_files.WholeFile:
        spec, hidden = record.spec, record.hidden
        assert hidden.is_contiguous()
        assert tuple(hidden.shape) == spec.shape
        layout = RecordLayout(spec.shape, spec.dtype, spec.has_scales, spec.metadata)
        scales = b"" if record.scales is None else record.scales.numpy().tobytes()
        return native_files.WholeFile(
            temporary=self._temporary(),
            final=self.handle(spec.request_id),
            front=bytearray(_front(layout, spec, scales)),
            checksum_at=layout.checksum_at(HIDDEN_STATES),
            data=hidden.data_ptr(),
            data_bytes=hidden.numel() * hidden.itemsize,
            needs_space=layout.total_bytes >= _ASK_FOR_SPACE,
        )

    def handle(self, request_id: str) -> str:
        """The path of a request's file.

        Raises:
            InvalidInputError: the request id is not a plain file name.
        """
        check_request_id(request_id)
        return f"{self.storage_path}/{request_id}{SUFFIX}"

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()
        self._finalizer()


def check_request_id(request_id: str) -> None:
    """Refuse an id that could name anything but a file in the storage folder.

    Raises:
        InvalidInputError: as it says.
    """
    if not isinstance(request_id, str) or not REQUEST_ID.fullmatch(request_id):
        raise InvalidInputError(
            "request_id", request_id, "1 to 200 letters, digits and _ . : = + @ -, not starting with a sign"
        )


class FileWriter(RecordWriter):
    """One file on its way. Rows go to disk as they come; the header, whose size is known, goes last."""

    def __init__(
        self, spec: RecordSpec, final: str, temporary: str, fsync: bool, helpers: Executor | None = None
    ) -> None:
        self._helpers = helpers
        self._spec = spec
        self._final = final
        self._temporary = temporary
        self._fsync = fsync
        self._layout = RecordLayout(spec.shape, spec.dtype, spec.has_scales, spec.metadata)
        self._begin = self._position = self._layout.begin[HIDDEN_STATES]
        self._digest = xxhash.xxh3_64()
        self._scales: list[bytes] = []
        self._whole = False
        """The front is written, too."""
        self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._ask_for_space()
        except OSError:
            self.abort()
            raise

    def _ask_for_space(self) -> None:
        if self._layout.total_bytes < _ASK_FOR_SPACE:
            return
        space = os.fstatvfs(self._fd)
        if space.f_blocks and space.f_bavail * space.f_frsize < self._layout.total_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._final)

    def write(self, hidden_TLH: torch.Tensor, scales_T11: torch.Tensor | None = None) -> None:
        data = _bytes_of(hidden_TLH)
        if scales_T11 is not None:
            self._scales.append(scales_T11.numpy().tobytes())
        if self._position == self._begin and len(data) == self._layout.total_bytes - self._begin <= _PIECE:
            # A whole record: in one call, as each lets go of the interpreter and has to get it back.
            self._digest.update(data)
            _pwrite(self._fd, [memoryview(self._front()), data], 0)
            self._position += len(data)
            self._whole = True
            return
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        if self._helpers is not None and len(pieces) > 1:
            self._write_together(self._helpers, pieces)
            return
        for piece in pieces:
            self._digest.update(piece)
            _pwrite(self._fd, [piece], self._position)
            self._position += len(piece)

    def _write_together(self, helpers: Executor, pieces: list[memoryview]) -> None:
        """Hash here while helpers write all pieces but the last."""
        writes = []
        try:
            for piece in pieces[:-1]:
                writes.append(helpers.submit(_pwrite, self._fd, [piece], self._position))
                self._position += len(piece)
            for piece in pieces:
                self._digest.update(piece)
            _pwrite(self._fd, [pieces[-1]], self._position)
            self._position += len(pieces[-1])
        finally:
            wait(writes)  # the memory is used again, whatever happened
        for write in writes:
            write.result()

    def _front(self) -> bytes:
        """Everything before the hidden states, once these are hashed."""
        return _front(self._layout, self._spec, b"".join(self._scales), self._digest.intdigest())

    def commit(self) -> str:
        assert self._position == self._layout.total_bytes, "commit before all rows were written"
        if not self._whole:
            _pwrite(self._fd, [memoryview(self._front())], 0)
        if self._fsync:
            os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)
        os.rename(self._temporary, self._final)
        if self._fsync:
            _sync_names([self._final])
        return self._final

    def abort(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        Path(self._temporary).unlink(missing_ok=True)


def _front(layout: RecordLayout, spec: RecordSpec, scales: bytes, digest: int = 0) -> bytes:
    """Everything before the hidden states.

    Args:
        digest: the hidden states' checksum.
    """
    tokens = spec.token_ids.numpy().tobytes()
    checksums = {TOKEN_IDS: xxhash.xxh3_64_intdigest(tokens), HIDDEN_STATES: digest}
    if spec.has_scales:
        checksums[SCALES] = xxhash.xxh3_64_intdigest(scales)
    front = layout.header(checksums) + tokens + scales
    assert len(front) == layout.begin[HIDDEN_STATES]
    return front


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _pwrite(fd: int, parts: list[memoryview], position: int) -> None:
    """Write parts, one behind the other."""
    while parts:
        written = os.pwritev(fd, parts, position)
        position += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]


def _sync_names(finals: Sequence[str]) -> None:
    """Flush the names that files of one folder have got. If that fails they may be lost, so the files go."""
    try:
        _sync_folder(os.path.dirname(finals[0]))
    except OSError:
        for final in finals:
            Path(final).unlink(missing_ok=True)
        raise


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hold_lock(path: Path) -> int:
    """Make the lock file and lock it; again, if another sink's clean-up came in between."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.pwrite(fd, b"layertap\n", 0)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _let_go(fd: int, path: Path, owner: int) -> None:
    os.close(fd)
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def remove_orphans(folder: Path) -> int:
    """Remove temporary files whose sink is dead. Returns how many."""
    by_token: dict[str, list[Path]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match:
                by_token.setdefault(match[1], []).append(Path(entry.path))
    removed = 0
    for token, paths in by_token.items():
        lock = folder / f".layertap-{token}.lock"
        try:
            fd: int | None = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = None
        except OSError:
            continue
        try:
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in paths:
                path.unlink(missing_ok=True)
                removed += path.suffix == ".tmp"
        except OSError:
            continue  # the lock is held: its sink is alive; or the files are not ours to remove
        finally:
            if fd is not None:
                os.close(fd)
    return removed
