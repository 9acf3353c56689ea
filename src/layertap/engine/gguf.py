"""A GGUF file, unpacked once into a ``transformers`` folder that then loads in a second.

Reading a GGUF file through Python takes half a minute even for a small model, at every start. The unpacked
folder (float32 weights, configuration, tokenizer) lies in the user's cache under what the file holds, not
where the file lies: all environments of a user share it. It may be deleted whenever no model is being loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import xxhash

logger = logging.getLogger("layertap")

# A float32 copy is eight times a 4-bit file: larger files are read directly, every time.
MAX_FILE_BYTES = 1 << 30
_FORM = 1
"""Of the unpacked folder: another number where what :func:`_write` makes is no longer the same."""
_UNUSED_SECONDS = 7 * 86400
_UNPACKING, _REMOVING = ".unpacking-", ".removing-"


def cache_folder() -> Path:
    """``$LAYERTAP_CACHE``, or ``layertap`` under the user's cache folder.

    Raises:
        FileNotFoundError: the user has no home folder.
    """
    own = os.environ.get("LAYERTAP_CACHE")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layertap"
    except RuntimeError as e:  # a user id that the system does not know, as in many containers
        raise FileNotFoundError(f"no home folder ({e}); set LAYERTAP_CACHE") from None


def unpack(file: Path) -> Path | None:
    """The folder that holds ``file`` unpacked, made if need be; None where the file is too large for that.

    A folder appears under its name when it is complete. Processes that unpack the same file at once do so
    each for itself, and the first one's folder stays.
    """
    if file.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        folder = cache_folder() / f"{file.stem}-{_key(file)}"
        if (folder / "config.json").is_file():
            with suppress(OSError):  # somebody else's, or on a disk that is not written to
                os.utime(folder)  # see _sweep
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_UNPACKING, dir=folder.parent))
    except OSError as e:
        logger.warning("no cache (%s): %s is read directly", e, file.name)
        return None
    logger.warning("unpacking %s into %s, once", file.name, folder)
    try:
        _write(file, temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):
        _sweep(folder.parent, file.stem)
    return folder


def _key(file: Path) -> str:
    """16 hex digits of what the file holds, and of what the unpacked folder depends on beside it.

    Releases of ``transformers`` read each other's folders, but need not over a major version.
    """
    with file.open("rb") as data:
        content = hashlib.file_digest(data, xxhash.xxh3_128).hexdigest()
    major = version("transformers").partition(".")[0]
    return xxhash.xxh3_64_hexdigest(f"{content}:{_FORM}:{major}".encode())


def _write(file: Path, folder: Path) -> None:
    import torch
    import transformers

    source = {"gguf_file": file.name}
    quantization = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), dtype=torch.float32, quantization_config=quantization, **source
    )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(file.parent), **source).save_pretrained(folder)


def _sweep(cache: Path, stem: str) -> None:
    """Remove what earlier files of this name were unpacked into, and what killed processes have left behind,
    if nobody has used it for a week.

    :func:`unpack` marks a folder as used, and who is told its name opens the files soon after. So nobody is
    about to open these, and files that are open outlive their names.
    """
    ours = re.compile(rf"{re.escape(stem)}-[0-9a-f]{{16}}|{re.escape(_UNPACKING)}.*|{re.escape(_REMOVING)}.*")
    before = time.time() - _UNUSED_SECONDS
    for path in cache.iterdir():
        with suppress(OSError):  # another process has been faster
            if ours.fullmatch(path.name) and path.stat().st_mtime < before:
                # Renamed first: under its own name a folder is there as a whole or not at all.
                hidden = Path(tempfile.mkdtemp(prefix=_REMOVING, dir=cache))
                try:
                    path.rename(hidden / path.name)
                finally:
                    shutil.rmtree(hidden, ignore_errors=True)
