"""Keeps the garbage collector from walking again and again through what was there before a long call.

A call over many prompts makes hundreds of thousands of objects that live until its end. Python takes such
growth for a sign of garbage and collects in full, which walks through everything that the process has ever
made: PyTorch, transformers and the user's own data too. With 16,384 short prompts that took half of all the
Python time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a generator may be finalised, and leave, wherever its thread then is
_calls = 0
_frozen = False


@contextmanager
def standing_heap() -> Iterator[None]:
    """While any thread is inside, the collector leaves alone what was there before the first one came.

    Nothing is lost by that: what became garbage meanwhile is collected afterwards. Where the process has
    frozen its heap itself, that stays as it is.
    """
    global _calls, _frozen
    with _lock:
        if _calls == 0 and gc.get_freeze_count() == 0:
            gc.freeze()
            _frozen = True
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if _calls == 0 and _frozen:
                gc.unfreeze()
                _frozen = False
