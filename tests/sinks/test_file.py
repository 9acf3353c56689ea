import errno
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

from layertap.errors import InvalidInputError
from layertap.record import read_record
from layertap.sinks.base import RecordSpec
from layertap.sinks.file import FileSink


def spec(request_id="r", rows=3, width=8):
    return RecordSpec(request_id, torch.arange(rows), (rows, 1, width), torch.float32)


def names(folder):
    return sorted(n for n in os.listdir(folder) if not n.endswith(".lock"))


@pytest.fixture
def sink(tmp_path):
    sink = FileSink(tmp_path / "deep" / "folder", fsync=True)
    yield sink
    sink.close()


def test_nothing_is_under_the_final_name_until_commit(sink):
    writer = sink.open(spec())
    writer.write(torch.ones(3, 1, 8))
    assert all(name.startswith(".") for name in names(sink.storage_path))
    path = writer.commit()
    assert path == sink.handle("r")
    assert names(sink.storage_path) == ["r.safetensors"]
    assert torch.equal(read_record(path).hidden_states, torch.ones(3, 1, 8))


def test_abort_leaves_nothing_at_any_stage(sink):
    before = len(os.listdir("/proc/self/fd"))
    for written in (0, 2, 3):
        writer = sink.open(spec())
        writer.write(torch.ones(written, 1, 8))
        writer.abort()
        writer.abort()
    assert names(sink.storage_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failed_rename_can_be_aborted(sink):
    writer = sink.open(spec())
    writer.write(torch.ones(3, 1, 8))
    os.mkdir(sink.handle("r"))
    with pytest.raises(OSError):
        writer.commit()
    writer.abort()
    assert names(sink.storage_path) == ["r.safetensors"]


@pytest.mark.parametrize(
    "request_id",
    ["../x", "a/b", "/etc/x", "", ".hidden", "..", "a\0b", "a\n", "x" * 201, "-f", "a b", "é", None],
)
def test_ids_that_are_no_plain_names_are_refused(sink, tmp_path, request_id):
    with pytest.raises(InvalidInputError, match="request_id"):
        sink.handle(request_id)
    with pytest.raises(InvalidInputError, match="request_id"):
        sink.open(spec(request_id))
    assert names(sink.storage_path) == []
    assert names(tmp_path) == ["deep"]


@pytest.mark.parametrize("request_id", ["cmpl-3f2a-0", "chatcmpl-a_b.c", "x" * 200, "0"])
def test_ids_that_servers_make_are_accepted(sink, request_id):
    assert sink.handle(request_id).endswith(f"/{request_id}.safetensors")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="shared_storage_path"):
        FileSink(tmp_path / "file" / "below")
    with pytest.raises(InvalidInputError, match="shared_storage_path"):
        FileSink("/proc/nowhere")


def test_files_of_a_dead_process_are_removed_and_those_of_living_sinks_stay(tmp_path):
    code = (
        "import os,sys,torch; from layertap.sinks.file import FileSink, RecordSpec\n"
        "s=FileSink(sys.argv[1])\n"
        "w=s.open(RecordSpec('r',torch.arange(3),(3,1,8),torch.float32))\n"
        "w.write(torch.ones(2,1,8)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(names(tmp_path)) == 1, "the dead process left its file"
    (tmp_path / "r0.safetensors").write_text("kept")
    (tmp_path / ".other.tmp").write_text("kept")
    first = FileSink(tmp_path)
    assert names(tmp_path) == [".other.tmp", "r0.safetensors"]
    writer = first.open(spec())
    writer.write(torch.ones(3, 1, 8))
    second = FileSink(tmp_path)
    read_record(writer.commit())
    first.close()
    second.close()
    assert sorted(os.listdir(tmp_path)) == [".other.tmp", "r.safetensors", "r0.safetensors"]


def _open_sink(folder, ready, go):
    sink = FileSink(folder)
    writer = sink.open(spec("child"))
    ready.set()
    go.wait(20)
    writer.write(torch.ones(3, 1, 8))
    writer.commit()
    sink.close()


def test_a_living_process_keeps_its_temporary_file(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    child = context.Process(target=_open_sink, args=(tmp_path, ready, go))
    child.start()
    assert ready.wait(20)
    FileSink(tmp_path).close()
    go.set()
    child.join(20)
    assert names(tmp_path) == ["child.safetensors"]


def test_a_record_that_cannot_fit_is_refused_before_it_is_written(tmp_path):
    sink = FileSink(tmp_path)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(OSError, match="No space left"):
        sink.open(spec(rows=1, width=free))
    assert names(tmp_path) == []
    sink.close()


def test_a_sink_that_is_forgotten_lets_go_of_its_lock(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    FileSink(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def large(helpers, folder, rows=(1000, 700)):
    """A record of 27 MB that comes in two parts."""
    sink = FileSink(folder, helpers=helpers)
    states = torch.randn(sum(rows), 1, 4000)
    writer = sink.open(spec("large", sum(rows), 4000))
    for part in states.split(list(rows)):
        buffer = part.clone()
        writer.write(buffer)
        buffer.zero_()  # the caller uses it again
    return sink, writer, states


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_large_records_are_the_same_whoever_writes_them(tmp_path, helpers):
    sink, writer, states = large(helpers, tmp_path)
    record = read_record(writer.commit(), verify=True)
    assert torch.equal(record.hidden_states, states)
    sink.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("layertap-helper")]


def test_a_helper_that_fails_fails_the_record(tmp_path, monkeypatch):
    pwritev = os.pwritev

    def full(fd, parts, position):
        if 8 << 20 < position < 16 << 20:
            raise OSError(errno.ENOSPC, "no space")
        return pwritev(fd, parts, position)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="no space"):
        large(2, tmp_path, rows=(1700,))


def test_calls_that_write_only_a_part_are_gone_on_with(tmp_path, monkeypatch):
    pwritev = os.pwritev

    def short(fd, parts, position):
        part = parts[0] if len(parts[0]) < 1000 else parts[0][: len(parts[0]) // 2 + 1]
        return pwritev(fd, [part], position)

    monkeypatch.setattr(os, "pwritev", short)
    for rows in ((1000, 700), (30,)):  # in parts, and whole
        sink, writer, states = large(0, tmp_path, rows)
        assert torch.equal(read_record(writer.commit(), verify=True).hidden_states, states)
        sink.close()
