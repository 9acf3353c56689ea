"""Whole records in one call: the same files as from a writer, and nothing left of what failed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layertap.record import read_record, verify_record
from layertap.sinks import native_files
from layertap.sinks.base import RecordSpec, WholeRecord
from layertap.sinks.file import FileSink

needs_library = pytest.mark.skipif(native_files.library() is None, reason="no C++ compiler, or not Linux")
BIG = (9 << 20) // 256


def record(request_id: str, rows: int = 7, dtype: torch.dtype = torch.bfloat16) -> WholeRecord:
    scaled = dtype == torch.float8_e4m3fn
    spec = RecordSpec(request_id, torch.arange(rows) + 5, (rows, 2, 64), dtype, scaled, {"model": "m"})
    scales = torch.rand(rows, 1, 1) if scaled else None
    return WholeRecord(spec, torch.randn(rows, 2, 64).to(dtype), scales)


def open_files() -> int:
    gc.collect()  # of sinks that earlier tests have left
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[FileSink]:
    sink = FileSink(tmp_path / "files", threads=3)
    yield sink
    sink.close()


def names(sink: FileSink) -> list[str]:
    return sorted(n for n in os.listdir(sink.storage_path) if not n.endswith(".lock"))


@needs_library
@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_files_are_the_same_to_the_byte_as_a_writers(tmp_path: Path, fsync: bool, dtype: torch.dtype) -> None:
    together = FileSink(tmp_path / "a", fsync, threads=3)
    alone = FileSink(tmp_path / "b")
    assert together.publishes_together
    assert not alone.publishes_together
    records = [record(f"r{i}", rows, dtype) for i, rows in enumerate([1, 7, 0, BIG, 30])]
    before = open_files()
    paths = together.publish(records)
    assert open_files() == before
    assert paths == [together.handle(f"r{i}") for i in range(5)]
    for one in records:
        writer = alone.open(one.spec)
        writer.write(one.hidden, one.scales)
        path = writer.commit()
        published = Path(together.handle(one.spec.request_id))
        assert published.read_bytes() == Path(path).read_bytes()
        assert published.stat().st_mode == Path(path).stat().st_mode
    assert torch.equal(
        read_record(str(paths[1])).hidden_states.view(torch.uint8), records[1].hidden.view(torch.uint8)
    )
    verify_record(str(paths[3]))
    assert len(names(together)) == 5
    together.close()
    alone.close()


@needs_library
def test_a_file_that_cannot_be_published_leaves_nothing_and_the_others_alone(sink: FileSink) -> None:
    os.mkdir(sink.handle("folder"))
    before = open_files()
    good, failed, also = sink.publish([record("good"), record("folder"), record("also")])
    assert (good, also) == (sink.handle("good"), sink.handle("also"))
    assert isinstance(failed, OSError)
    assert failed.errno == errno.EISDIR
    assert failed.filename == sink.handle("folder")
    assert names(sink) == ["also.safetensors", "folder.safetensors", "good.safetensors"]
    assert open_files() == before


@needs_library
def test_a_folder_that_cannot_be_flushed_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FileSink(tmp_path, fsync=True, threads=2)
    os.mkdir(sink.handle("folder"))

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr("layertap.sinks.file._sync_folder", fail)
    errors = sink.publish([record("a"), record("folder"), record("b")])
    assert [e.errno for e in errors if isinstance(e, OSError)] == [errno.EIO, errno.EISDIR, errno.EIO]
    assert names(sink) == ["folder.safetensors"]
    sink.close()


@needs_library
def test_a_folder_that_has_gone_is_told_for_each(sink: FileSink) -> None:
    for path in sink.storage_path.iterdir():
        path.unlink()
    sink.storage_path.rmdir()
    errors = sink.publish([record("a"), record("b")])
    assert [e.errno for e in errors if isinstance(e, OSError)] == [errno.ENOENT] * 2


@needs_library
def test_a_temporary_name_that_is_taken_is_not_touched(sink: FileSink) -> None:
    taken = sink.storage_path / "taken"
    taken.write_text("somebody's")
    data = ctypes.create_string_buffer(8)
    file = native_files.WholeFile(
        str(taken), str(sink.storage_path / "x"), bytearray(32), 0, ctypes.addressof(data), 8, False
    )
    assert native_files.publish([file], 1, False) == [errno.EEXIST]
    assert names(sink) == ["taken"]
    assert taken.read_text() == "somebody's"


@needs_library
def test_more_threads_than_the_system_gives_and_many_records(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, threads=64)
    records = [record(f"r{i}") for i in range(300)]
    assert sink.publish(records) == [sink.handle(f"r{i}") for i in range(300)]
    assert len(names(sink)) == 300
    sink.close()


@needs_library
def test_locks_are_taken_and_let_go_of(tmp_path: Path) -> None:
    stale = tmp_path / "a.error"
    stale.write_text("an earlier one's")
    pairs = [(str(tmp_path / f"{n}.error"), str(tmp_path / f"{n}.lock")) for n in ("a", "b", "no/folder")]
    a, b, missing = native_files.lock(pairs)
    assert missing == -errno.ENOENT
    assert not stale.exists()
    with open(pairs[0][1]) as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not os.get_inheritable(a)
        native_files.close([a, b])
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_without_a_compiler_records_are_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with caplog.at_level(logging.INFO, "layertap"):
        assert native_files.library.__wrapped__() is None
    assert "/no/such/compiler" in caplog.text
    monkeypatch.setattr(native_files, "library", lambda: None)
    sink = FileSink(tmp_path, threads=4)
    assert not sink.publishes_together
    sink.close()


def test_a_hash_that_differs_or_is_not_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        argtypes = restype = None

        def __call__(self, *_: object) -> int:
            return 1

    class Library:
        def __init__(self, _: str) -> None:
            self.XXH3_64bits = Wrong()

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert native_files._hash.__wrapped__() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert native_files._hash.__wrapped__() is None
