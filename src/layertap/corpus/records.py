"""A folder of records: list it, check it, read it for training."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layertap.errors import CorruptRecordError, InvalidInputError
from layertap.record import HiddenStates, RecordCheck, read_record, verify_record
from layertap.sinks.file import SUFFIX

OnBroken = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class RecordStatus:
    """What the check of one file found."""

    path: str
    check: RecordCheck | None
    """None if the file is broken."""
    problem: str | None = None
    """Why it is broken; None if it is intact."""

    @property
    def ok(self) -> bool:
        return self.problem is None


def record_paths(path: str | os.PathLike[str]) -> list[str]:
    """The records of a folder in the order of their names; a file is itself.

    Raises:
        InvalidInputError: no such file or folder.
    """
    if os.path.isfile(path):
        return [os.fspath(path)]
    try:
        with os.scandir(path) as entries:
            return sorted(e.path for e in entries if is_record(e.name) and e.is_file())
    except OSError as e:
        raise InvalidInputError(
            "path", os.fspath(path), f"a folder of records, or one file ({e.strerror})"
        ) from None


def is_record(name: str) -> bool:
    """Whether a file's name is one that a finished record can have."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def check_record(path: str | os.PathLike[str]) -> RecordStatus:
    """Check one file from end to end; what is wrong is told, not raised."""
    try:
        return RecordStatus(os.fspath(path), verify_record(path))
    except CorruptRecordError as e:
        return RecordStatus(os.fspath(path), None, e.problem)
    except OSError as e:
        return RecordStatus(os.fspath(path), None, f"not readable: {e.strerror}")


def verify_corpus(path: str | os.PathLike[str]) -> Iterator[RecordStatus]:
    """Check every record of a folder: structure, size and checksums.

    Raises:
        InvalidInputError: no such folder.
    """
    return map(check_record, record_paths(path))


def iter_records(
    path: str | os.PathLike[str],
    *,
    verify: bool = False,
    on_broken: OnBroken = "raise",
    seed: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[HiddenStates]:
    """Yield the records of a folder one by one; tensors are memory-mapped, so nothing is read before its use.

    Args:
        path: a folder, or one file.
        verify: check the checksums too; the structure is always checked.
        on_broken: ``"raise"`` or ``"skip"`` a broken file.
        seed: None goes by name; a number shuffles the files, differently for each number (an epoch, say).
        shard: ``(i, n)`` yields the i-th of n equal parts: one for each rank or data-loader worker.

    Raises:
        CorruptRecordError: a broken file, with ``on_broken="raise"``.
        InvalidInputError: no such folder, or a wrong argument.
    """
    if on_broken not in ("raise", "skip"):
        raise InvalidInputError("on_broken", on_broken, "'raise' or 'skip'")
    index, count = shard
    if not 0 <= index < count:
        raise InvalidInputError("shard", shard, "(i, n) with 0 <= i < n")
    paths = record_paths(path)
    if seed is not None:
        random.Random(seed).shuffle(paths)
    return _read_all(paths[index::count], verify, on_broken)


def _read_all(paths: list[str], verify: bool, on_broken: OnBroken) -> Iterator[HiddenStates]:
    for path in paths:
        try:
            record = read_record(path, verify=verify)
        except CorruptRecordError:
            if on_broken == "raise":
                raise
            continue
        yield record


def short_name(path: str) -> str:
    """The file's name alone."""
    return Path(path).name
