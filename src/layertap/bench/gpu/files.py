"""Record files of a run, whoever writes them: wait until all are complete, check what is in them, remove
them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

_PAUSE = 0.002
_PATIENCE = 120.0


def wait_complete(paths: Sequence[str], shapes: Sequence[tuple[int, int, int]], itemsize: int) -> None:
    """Return when every file is there with all its bytes.

    Args:
        shapes: [T, L, H] of each file's ``hidden_states``.
        itemsize: bytes of one number.

    Raises:
        RuntimeError: a writer left word that it failed.
        TimeoutError: not all are complete after two minutes.
    """
    waiting = [(path, itemsize * t * layers * h) for path, (t, layers, h) in zip(paths, shapes, strict=True)]
    deadline = time.monotonic() + _PATIENCE
    while waiting := [(path, size) for path, size in waiting if not _has(path, size)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(waiting)} of {len(paths)} files are not complete after {_PATIENCE:g} s")
        time.sleep(_PAUSE)


def _has(path: str, size: int) -> bool:
    try:
        return os.path.getsize(path) >= size
    except FileNotFoundError:
        if os.path.exists(path + ".error"):
            raise RuntimeError(Path(path + ".error").read_text()) from None
        return False


def check(paths: Sequence[str], shapes: Sequence[tuple[int, int, int]]) -> None:
    """Look at every file's header.

    Raises:
        ValueError: a file is cut off, or holds other states than those that were asked for.
    """
    for path, shape in zip(paths, shapes, strict=True):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = tuple(header["hidden_states"]["shape"])
        size = 8 + length + max(int(tensor["data_offsets"][1]) for tensor in header.values())
        if found != shape or os.path.getsize(path) != size:
            raise ValueError(
                f"{path}: {os.path.getsize(path)} bytes with hidden_states {list(found)}, "
                f"not {size} with {list(shape)}"
            )


def first_written(paths: Sequence[str]) -> float:
    """When the first of the files got its last byte, in seconds on ``time.time()``'s clock."""
    return min(os.stat(path).st_mtime for path in paths)


def clear(folder: Path) -> None:
    """Remove a run's records and what lies beside them."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
