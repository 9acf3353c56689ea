"""Where unpacked GGUF files lie, who shares them, and what becomes of old ones."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from layertap.engine import gguf

WEEK = 7 * 86400


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LAYERTAP_CACHE", str(folder))
    return folder


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were unpacked, by something quicker than ``transformers``."""
    files: list[Path] = []

    def write(file: Path, folder: Path) -> None:
        files.append(file)
        assert folder.name.startswith(".")  # not under its final name until it is complete
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf, "_write", write)
    return files


def model(folder: Path, content: bytes = b"weights", name: str = "small.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_environments_share_one_folder(cache: Path, written: list[Path], tmp_path: Path) -> None:
    first, second = model(tmp_path / "venv"), model(tmp_path / "other" / "venv")
    os.utime(second, (1, 1))
    folder = gguf.unpack(first)
    assert folder is not None
    assert folder.parent == cache
    assert gguf.unpack(second) == folder
    assert written == [first]
    assert (folder / "weights").read_bytes() == b"weights"


@pytest.mark.parametrize("changed", ["content", "name", "form", "transformers"])
def test_what_the_folder_depends_on_is_in_its_name(
    changed: str, cache: Path, written: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model(tmp_path / "a")
    folder = gguf.unpack(file)
    if changed == "content":
        stat = file.stat()
        file.write_bytes(b"Weights")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same size and time
    elif changed == "name":
        file = model(tmp_path / "a", name="other.gguf")
    elif changed == "form":
        monkeypatch.setattr(gguf, "_FORM", gguf._FORM + 1)
    else:
        monkeypatch.setattr(gguf, "version", lambda name: "99.0.1")
    other = gguf.unpack(file)
    assert other is not None
    assert other != folder
    assert len(written) == 2
    assert (other / "weights").read_bytes() == file.read_bytes()


def test_minor_releases_of_transformers_share(
    cache: Path, written: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model(tmp_path / "a")
    for release in ("5.17.0", "5.24.1"):
        monkeypatch.setattr(gguf, "version", lambda name, release=release: release)
        gguf.unpack(file)
    assert len(written) == 1


def test_old_folders_of_the_model_go_when_a_new_one_is_made(
    cache: Path, written: list[Path], tmp_path: Path
) -> None:
    old, recent, reused = (gguf.unpack(model(tmp_path / "a", content)) for content in (b"1", b"2", b"3"))
    assert old is not None
    assert recent is not None
    assert reused is not None
    left = [".unpacking-killed", ".removing-killed"]
    others = ["small-of-another-kind", "small.v2-0123456789abcdef", "kernels", "large-0123456789abcdef"]
    for name in (*left, *others):
        (cache / name).mkdir()
        (cache / name / "weights").write_bytes(b"")
    (cache / ".unpacking-running").mkdir()
    long_ago = time.time() - WEEK - 60
    for path in (old, reused, *(cache / name for name in (*left, *others))):
        os.utime(path, (long_ago, long_ago))
    os.utime(recent, (long_ago + 120, long_ago + 120))
    assert gguf.unpack(model(tmp_path / "b", b"3")) == reused  # which marks it as used
    assert old.exists()

    new = gguf.unpack(model(tmp_path / "a", b"4"))
    assert new is not None
    assert names(cache) == {recent.name, reused.name, new.name, ".unpacking-running", *others}


def test_open_files_of_a_folder_that_goes_stay_readable(
    cache: Path, written: list[Path], tmp_path: Path
) -> None:
    old = gguf.unpack(model(tmp_path / "a", b"old"))
    assert old is not None
    os.utime(old, (1, 1))
    with open(old / "weights", "rb") as reading:
        gguf.unpack(model(tmp_path / "a", b"new"))
        assert not old.exists()
        assert reading.read() == b"old"


def test_a_folder_that_cannot_be_swept_does_no_harm(
    cache: Path, written: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = gguf.unpack(model(tmp_path / "a", b"old"))
    assert old is not None
    os.utime(old, (1, 1))

    def refuse(self: Path, target: Path) -> Path:
        if Path(target).parent != cache:
            raise PermissionError(13, "in use")
        os.rename(self, target)
        return target

    monkeypatch.setattr(Path, "rename", refuse)
    new = gguf.unpack(model(tmp_path / "a", b"new"))
    assert new is not None
    assert names(cache) == {old.name, new.name}


def test_processes_that_unpack_at_once_end_with_one_whole_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=30)

    def write(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        both.wait()

    monkeypatch.setattr(gguf, "_write", write)
    file = model(tmp_path / "a")
    found: list[Path | None] = []
    threads = [threading.Thread(target=lambda: found.append(gguf.unpack(file))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(found)) == 1
    assert names(cache) == {found[0].name}  # type: ignore[union-attr]


def test_an_unpacking_that_fails_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ValueError("not a GGUF file")

    monkeypatch.setattr(gguf, "_write", fail)
    with pytest.raises(ValueError, match="not a GGUF"):
        gguf.unpack(model(tmp_path / "a"))
    assert names(cache) == set()


def test_a_deleted_folder_is_made_again(cache: Path, written: list[Path], tmp_path: Path) -> None:
    file = model(tmp_path / "a")
    folder = gguf.unpack(file)
    assert folder is not None
    shutil.rmtree(folder)
    assert gguf.unpack(file) == folder
    assert len(written) == 2


@pytest.mark.parametrize("trouble", ["large", "no cache"])
def test_without_a_cache_the_file_is_read_directly(
    trouble: str,
    cache: Path,
    written: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if trouble == "large":
        monkeypatch.setattr(gguf, "MAX_FILE_BYTES", 3)
    else:
        cache.write_text("a file")
    with caplog.at_level(logging.WARNING, "layertap"):
        assert gguf.unpack(model(tmp_path / "a")) is None
    assert written == []
    assert ("no cache" in caplog.text) == (trouble == "no cache")
