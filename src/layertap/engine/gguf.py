"""A GGUF file, unpacked once into a ``transformers`` folder that then loads in a second.

Reading a GGUF file through Python takes half a minute even for a small model, at every start. The unpacked
folder (float32 weights, configuration, tokenizer) lies in the user's cache, under the file's name, size and
time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger("layertap")

# A float32 copy is eight times a 4-bit file: larger files are read directly, every time.
MAX_FILE_BYTES = 1 << 30


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
    """The folder that holds ``file`` unpacked, made if need be; None where the file is too large for that."""
    stat = file.stat()
    if stat.st_size > MAX_FILE_BYTES:
        return None
    key = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    try:
        folder = cache_folder() / f"{file.stem}-{key}"
        if (folder / "config.json").is_file():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
    except OSError as e:
        logger.warning("no cache (%s): %s is read directly", e, file.name)
        return None
    import torch
    import transformers

    logger.warning("unpacking %s into %s, once", file.name, folder)
    try:
        source = {"gguf_file": file.name}
        quantization = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.parent), dtype=torch.float32, quantization_config=quantization, **source
        )
        model.save_pretrained(temporary)
        transformers.AutoTokenizer.from_pretrained(str(file.parent), **source).save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
