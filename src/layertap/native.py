"""C++ that is compiled at its first use, with the machine's compiler, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from layertap.engine.gguf import cache_folder

logger = logging.getLogger("layertap")

_BUILD_SECONDS = 120
_DIGEST_BYTES = 32


def build(source: Path, headers: Sequence[Path], flags: Sequence[str], without: str) -> ctypes.CDLL | None:
    """The library of a source file: from the cache, or built now; None where that is not possible.

    Args:
        headers: files that it includes.
        without: what happens where it cannot be built; said once, with the reason.
    """
    compiler = os.environ.get("CXX", "").split() or ["g++"]  # as make takes it: ccache g++, say
    if shutil.which(compiler[0]) is None:
        logger.info("no C++ compiler (%s): %s", compiler[0], without)
        return None
    try:
        version = _output(*compiler, "--version")
        return _load(source, headers, [*compiler, *flags], version)
    except (OSError, subprocess.SubprocessError) as e:
        told: bytes = getattr(e, "stderr", None) or str(e).encode()
        reason = told.decode(errors="replace").strip()[-500:]
        logger.warning("%s was not built, %s: %s", source.name, without, reason)
        return None


def _load(source: Path, headers: Sequence[Path], command: list[str], version: bytes) -> ctypes.CDLL:
    """The library for this source, compiler and processor."""
    texts = [path.read_bytes() for path in (source, *headers)]
    key = hashlib.sha256(b"\0".join([*texts, version, " ".join(command).encode(), _processor()]))
    name = f"{source.stem}-{key.hexdigest()[:16]}.so"
    try:
        return ctypes.CDLL(str(_cached(cache_folder() / "kernels" / name, source, command)))
    except OSError:  # no folder that can be written to, or loaded from: built for this process
        with tempfile.TemporaryDirectory(prefix="layertap-kernels-") as folder:
            made = Path(folder) / name
            _compile(source, command, made)
            return ctypes.CDLL(str(made))


def _cached(target: Path, source: Path, command: list[str]) -> Path:
    """Have the library in a file that other processes use, too. The digest at its end tells whether it is
    whole: loading one that a crash has torn would end the process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file():
        data = target.read_bytes()
        if _digest(data[:-_DIGEST_BYTES]) == data[-_DIGEST_BYTES:]:
            return target
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as building:
        made = Path(building) / target.name
        _compile(source, command, made)
        data = made.read_bytes()
        with made.open("ab") as file:
            file.write(_digest(data))
        os.replace(made, target)
    return target


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _compile(source: Path, command: list[str], made: Path) -> None:
    _output(*command, "-o", str(made), str(source))


def _output(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout


def _processor() -> bytes:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(x for x in lines if x.startswith(("model name", "flags", "vendor_id"))).encode()
