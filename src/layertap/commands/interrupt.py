"""Ctrl-C: the first one ends a command in order, the second one at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from layertap.commands.output import print_error

INTERRUPTED = 130
"""Exit status."""
_PATIENCE = 1.0
"""Seconds."""


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Within, an interrupt waits for the step that runs, and says so if that takes a while; another one ends
    the process. Files that are complete stay, and none is ever half-written under its final name."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's jobs may ignore it
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    note = threading.Timer(_PATIENCE, print_error, ["ending with the step that runs; Ctrl-C again: at once"])
    note.daemon = True

    def at_once(number: int, frame: FrameType | None) -> None:
        print_error("ended at once")
        sys.stdout.flush()
        os._exit(INTERRUPTED)

    def in_order(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, at_once)
        note.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, in_order)
    try:
        yield
    finally:
        note.cancel()
        signal.signal(signal.SIGINT, before)
