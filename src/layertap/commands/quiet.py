"""Keeps other libraries' progress bars and advice out of a command's output, and our log to a line each."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

DEBUG_VARIABLE = "LAYERTAP_DEBUG"


def debugging() -> bool:
    """Whether the user asked for tracebacks: ``--verbose``, or ``LAYERTAP_DEBUG`` set."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if debugging():
            return super().format(record)
        text = f"layertap: {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text += f": {type(error).__name__}: {error}"
        return " ".join(text.split())


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at the time: a progress bar puts its own stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging() -> None:
    """Send this package's log to standard error: warnings, or everything when debugging."""
    logger = logging.getLogger("layertap")
    if not any(isinstance(h, _Stderr) for h in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debugging() else logging.WARNING)
    logger.propagate = False


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Import and run with the libraries' own chatter off; with debugging on, nothing is hidden.

    vLLM, which logs to standard output, is sent to standard error: a command's results alone go there.

    On a terminal, bars of what takes long and happens once stay: a download, the unpacking of a GGUF file.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if debugging():
        yield
        return
    terminal = sys.stderr.isatty()
    # Read when the libraries are imported; vLLM's processes inherit them.
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }.items():
        os.environ.setdefault(name, value)
    if not terminal:
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it speaks before it reads its level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as library

        library.set_verbosity_error()
        library.disable_progress_bar()
        if terminal:
            from huggingface_hub.utils.tqdm import enable_progress_bars

            enable_progress_bars()  # the line above turned them off too
        yield
