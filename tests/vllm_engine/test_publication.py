"""The lock protocol and the error file, with real files and another process."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from layertap import reader
from layertap.errors import ExtractionError, HandleNotFoundError
from layertap.vllm.publication import Publication


def test_the_lock_is_held_in_the_eyes_of_another_process_until_publication(tmp_path: Path) -> None:
    publication = Publication()
    path = str(tmp_path / "a.safetensors")
    publication.begin(path)
    # vLLM's own readers open the lock read-only and sleep on it.
    code = (
        "import fcntl, sys, time\n"
        "with open(sys.argv[1]) as f:\n"
        "    print('opened', flush=True)\n"
        "    fcntl.flock(f, fcntl.LOCK_SH)\n"
        "    print(open(sys.argv[1][:-5]).read())\n"
    )
    command = [sys.executable, "-c", code, path + ".lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "opened\n"
        time.sleep(0.05)
        assert process.poll() is None
        Path(path).write_text("complete")
        publication.publish(path)
        assert process.stdout.read().strip() == "complete"
    assert os.path.exists(path + ".lock")
    assert len(publication) == 0


def test_a_failure_leaves_its_reason_and_kind_for_the_reader(tmp_path: Path) -> None:
    publication = Publication()
    path = str(tmp_path / "a.safetensors")
    publication.begin(path)
    publication.fail(path, "no room\nfor it", "storage_full")
    with pytest.raises(ExtractionError, match="no room for it") as caught:
        reader.open(path, timeout=5)
    assert caught.value.kind == "storage_full"
    publication.begin(path)  # sent again under the same name: the old word is gone
    assert not os.path.exists(path + ".error")
    publication.close()


def test_a_reader_that_waits_is_woken_by_a_failure(tmp_path: Path) -> None:
    publication = Publication()
    path = str(tmp_path / "a.safetensors")
    publication.begin(path)
    threading.Timer(0.1, publication.fail, (path, "gone", "storage")).start()
    with pytest.raises(ExtractionError, match="gone"):
        reader.open(path, timeout=10)


def test_an_aborted_request_leaves_nothing(tmp_path: Path) -> None:
    publication = Publication()
    path = str(tmp_path / "a.safetensors")
    publication.begin(path)
    publication.drop(path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(HandleNotFoundError):
        reader.open(path, timeout=0)


def test_without_locks_no_lock_file_is_made(tmp_path: Path) -> None:
    publication = Publication(use_locks=False)
    path = str(tmp_path / "a.safetensors")
    publication.begin(path)
    assert os.listdir(tmp_path) == []
    publication.publish(path)


def test_descriptors_return_to_where_they_were(tmp_path: Path) -> None:
    publication = Publication()
    before = len(os.listdir("/proc/self/fd"))
    for i in range(50):
        publication.begin(str(tmp_path / f"{i}.safetensors"))
    for i in range(0, 50, 2):
        publication.publish(str(tmp_path / f"{i}.safetensors"))
        publication.drop(str(tmp_path / f"{i + 1}.safetensors"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_storage_that_takes_no_lock_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    publication = Publication()
    path = str(tmp_path / "file" / "a.safetensors")
    publication.begin(path)
    publication.fail(path, "not a folder", "storage")
    assert len(publication) == 0


def test_the_lock_can_be_opened_read_write_for_network_file_systems(tmp_path: Path) -> None:
    publication = Publication()
    path = str(tmp_path / "a.safetensors")
    publication.begin(path)
    with open(path + ".lock", "r+b") as f, pytest.raises(BlockingIOError):
        fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    publication.close()


@pytest.mark.parametrize("use_locks", [True, False])
def test_a_folder_that_was_taken_away_is_there_again_for_the_next_file(
    tmp_path: Path, use_locks: bool
) -> None:
    publication = Publication(use_locks)
    path = tmp_path / "gone" / "a.safetensors"
    publication.begin(str(path))
    path.write_text("complete")
    publication.publish(str(path))
