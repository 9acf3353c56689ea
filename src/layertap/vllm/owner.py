"""vLLM's processes live as long as the program that started them, however that ends.

vLLM itself sees to neither half of it. A program that is killed leaves the core process and its workers
behind, with their memory, and with requests that go on being written; and Ctrl-C, which a terminal (or a
notebook) sends to all processes at once, ends the workers under a program that may want to go on, or to end
in order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

_GRACE = 10.0  # seconds for vLLM to end by itself


def belong_to(owner_pid: int) -> None:
    """To be called in vLLM's processes: leave Ctrl-C to the owner, and end when it is gone. (Workers end with
    the core, which is the owner's child.) In the owner itself this does nothing."""
    if os.getpid() == owner_pid:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == owner_pid:
        threading.Thread(target=_watch, args=(parent,), name="layertap-owner", daemon=True).start()


def _watch(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)
