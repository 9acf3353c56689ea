import asyncio
import fcntl
import os
import threading
import time

import pytest
import torch
from safetensors.torch import save, save_file

from layertap import reader
from layertap.errors import CorruptRecordError, ExtractionError, HandleNotFoundError

TENSORS = {"token_ids": torch.arange(3), "hidden_states": torch.ones(3, 2, 4)}


def after(seconds, action, *args):
    timer = threading.Timer(seconds, action, args)
    timer.start()
    return timer


def publish(path):
    """As a sink does it: the file gets its name when it is complete."""
    save_file(TENSORS, f"{path}.part")
    os.rename(f"{path}.part", path)


def test_open_waits_for_the_file(tmp_path):
    path = tmp_path / "r.safetensors"
    after(0.05, publish, path)
    assert len(reader.open(path, timeout=5)) == 3
    assert reader.exists(path)


def test_a_file_that_never_comes_is_named_with_what_to_do(tmp_path):
    start = time.monotonic()
    with pytest.raises(HandleNotFoundError, match=r"none.safetensors: no such file after 0.05 s; check"):
        reader.open(tmp_path / "none.safetensors", timeout=0.05)
    assert time.monotonic() - start < 2


def test_a_file_is_not_read_while_its_writer_holds_the_lock(tmp_path):
    path = tmp_path / "r.safetensors"
    whole = save(TENSORS)
    path.write_bytes(whole[:50])  # in the middle of being written
    lock = open(f"{path}.lock", "w")  # noqa: SIM115 - let go of by the timer
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not reader.exists(path)
    with pytest.raises(HandleNotFoundError, match="still holds"):
        reader.open(path, timeout=0.03)

    def finish():
        path.write_bytes(whole)
        lock.close()

    after(0.05, finish)
    assert len(reader.open(path, timeout=5)) == 3
    assert reader.delete(path)
    assert os.listdir(tmp_path) == []


def test_a_lock_may_be_there_before_the_file(tmp_path):
    path = tmp_path / "r.safetensors"
    (tmp_path / "r.safetensors.lock").touch()
    after(0.03, publish, path)
    assert len(reader.open(path, timeout=5)) == 3


def test_the_lock_file_is_opened_read_write_and_readers_do_not_exclude_each_other(tmp_path, monkeypatch):
    path = tmp_path / "r.safetensors"
    save_file(TENSORS, path)
    (tmp_path / "r.safetensors.lock").touch()
    modes = []
    real = fcntl.flock
    monkeypatch.setattr(
        fcntl, "flock", lambda fd, how: (modes.append(fcntl.fcntl(fd, fcntl.F_GETFL)), real(fd, how))
    )
    with open(str(path) + ".lock", "r+") as other:
        real(other, fcntl.LOCK_SH)
        reader.open(path, timeout=1)
    assert [mode & os.O_ACCMODE for mode in modes] == [os.O_RDWR]


def test_no_lock_file_is_needed_or_made(tmp_path):
    save_file(TENSORS, tmp_path / "r.safetensors")
    reader.open(tmp_path / "r.safetensors", timeout=0)
    assert os.listdir(tmp_path) == ["r.safetensors"]


def test_an_error_file_ends_the_wait_with_its_reason(tmp_path):
    path = tmp_path / "r1.safetensors"
    (tmp_path / "r1.safetensors.error").write_text("disk full\n")
    with pytest.raises(ExtractionError, match="request r1: disk full"):
        reader.open(path, timeout=5)
    assert not reader.delete(path)
    assert os.listdir(tmp_path) == []


def test_a_damaged_file_is_not_waited_for(tmp_path):
    (tmp_path / "r").write_bytes(save(TENSORS)[:-1])
    with pytest.raises(CorruptRecordError, match="cut off"):
        reader.open(tmp_path / "r", timeout=5)


def test_a_memory_handle_of_nobody_says_so():
    assert not reader.exists("memory://nobody")
    assert not reader.delete("memory://nobody")
    with pytest.raises(HandleNotFoundError, match="process that extracted"):
        reader.open("memory://nobody", timeout=0.01)


def test_descriptors_return_to_where_they_were(tmp_path):
    path = tmp_path / "r.safetensors"
    save_file(TENSORS, path)
    (tmp_path / "r.safetensors.lock").touch()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        reader.open(path)
        reader.exists(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_asynchronous_variants_wait_together(tmp_path):
    paths = [tmp_path / f"r{i}" for i in range(20)]

    async def main():
        waiting = [asyncio.create_task(reader.aopen(path, timeout=5)) for path in paths]
        await asyncio.sleep(0.02)
        for path in paths:
            publish(path)
        records = await asyncio.gather(*waiting)
        assert all(len(record) == 3 for record in records)
        assert await reader.adelete(paths[0])
        with pytest.raises(HandleNotFoundError):
            await reader.aopen(paths[0], timeout=0.01)

    asyncio.run(main())
