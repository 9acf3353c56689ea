"""Keeps the garbage collector from walking again and again through what was there before a long call.

A call over many prompts makes hundreds of thousands of objects that live until its end. Python takes such
growth for a sign of garbage and collects in full, which walks through everything that the process has ever
made: PyTorch, transformers and the user's own data too. With 16,384 short prompts that took half of all the
Python time.

It has a price. To freeze the heap and let it go again moves all young objects among the oldest, and sets back
the counters by which Python finds that it is time to collect: a program that does so with every batch is
never collected in full, and keeps all its cycles. So short calls do not do it, and long ones collect
afterwards, now and then.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MANY = 1024
"""From so many prompts on a call is long."""
_SECONDS = 60.0  # of long calls, at least, between two collections: they take tenths of a second

_lock = threading.RLock()  # a generator may be finalised, and leave, wherever its thread then is
_calls = 0
_frozen = False
_collected: float | None = None


@contextmanager
def standing_heap() -> Iterator[Callable[[int], None]]:
    """Gives a function that is to be told how many prompts there have been. Once they are many, and while any
    thread is inside that has had so many, the collector leaves alone what was there when the first one had.

    Nothing is lost by that: what became garbage meanwhile is collected afterwards. Where the process has
    frozen its heap itself, that stays as it is.
    """
    inside = False

    def note(num_prompts: int) -> None:
        nonlocal inside
        if num_prompts >= MANY and not inside:
            inside = True
            _enter()

    try:
        yield note
    finally:
        if inside:
            _leave()


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Holds the collector back for a moment in which much is made that will live, while a GPU waits: it would
    walk through new lists of token ids again and again."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:  # else it is another call's, or the program's own affair
            gc.enable()


def _enter() -> None:
    global _calls, _frozen, _collected
    with _lock:
        if _calls == 0 and gc.get_freeze_count() == 0:
            gc.freeze()
            _frozen = True
            _collected = _collected or time.monotonic()
        _calls += 1


def _leave() -> None:
    global _calls, _frozen, _collected
    due = False
    with _lock:
        _calls -= 1
        if _calls == 0 and _frozen:
            gc.unfreeze()
            _frozen = False
            now = time.monotonic()
            due = _collected is None or now - _collected >= _SECONDS
            if due:
                _collected = now
    if due:
        gc.collect()
