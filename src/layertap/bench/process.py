"""A process that is asked and answers in JSON lines: what every measured way runs in.

It has a process group of its own, so that whatever it starts (an engine's worker, a server) ends with it and
its memory, a GPU's too, is free for the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layertap.errors import LayertapError

_TAIL = 800
_GRACE_SECONDS = 4.0
_GROUP_SECONDS = 20.0
_LOOK_SECONDS = 0.5
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: .*")


class PeerFailedError(LayertapError, RuntimeError):
    """A peer's process ended before it answered."""


class OutOfTimeError(LayertapError, RuntimeError):
    """A peer's process did not answer before the deadline."""


class JsonProcess:
    """A running child.

    Args:
        name: for messages.
        command: starts it; it answers on its standard output.
        log: gets what it prints on standard error.
        env: its environment.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._log = log.open("wb")
        self.started = time.time()
        """When it was started, in seconds on ``time.time()``'s clock."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(env),
            start_new_session=True,
        )
        self._answer = b""
        self._owes = False

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def ask(self, **question: Any) -> None:
        """Send one line.

        Raises:
            PeerFailedError: it has ended; with the end of what it printed.
        """
        assert self._process.stdin is not None
        self._owes = True
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(
        self,
        deadline: float = float("inf"),
        every: float = 30.0,
        waiting: Callable[[float], None] = lambda seconds: None,
    ) -> dict[str, Any]:
        """The next line that it prints.

        Args:
            deadline: on ``time.monotonic()``'s clock.
            every: seconds after which ``waiting`` is told how long the wait has been, again and again.

        Raises:
            PeerFailedError: it has ended; with the end of what it printed.
            OutOfTimeError: the deadline has passed.
        """
        assert self._process.stdout is not None
        begun = time.monotonic()
        told = 0
        while b"\n" not in self._answer:
            now = time.monotonic()
            if now >= deadline:
                raise OutOfTimeError(f"{self.name} was stopped after {now - begun:.0f} s without an answer")
            ended = self._process.poll() is not None
            pause = min(deadline - now, begun + (told + 1) * every - now, _LOOK_SECONDS)
            if not select.select([self._process.stdout], [], [], max(0.0, pause))[0]:
                if ended:  # what it has started may hold its output open
                    raise self._ended()
                if time.monotonic() >= begun + (told + 1) * every:
                    told += 1
                    waiting(time.monotonic() - begun)
                continue
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._ended()
            self._answer += data
        line, _, self._answer = self._answer.partition(b"\n")
        self._owes = False
        result = json.loads(line)
        assert isinstance(result, dict)
        return result

    def _ended(self) -> PeerFailedError:
        self._process.wait()
        return PeerFailedError(f"the benchmark's process for {self.name} has ended:\n{self.tail()}")

    def tail(self, most: int = _TAIL) -> str:
        """The last characters that it printed on standard error."""
        return self.log.read_text(errors="replace")[-most:]

    def causes(self, most: int = 4) -> list[str]:
        """The first lines that name an error: what an engine says before its other processes say that it has
        ended."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = (match[0][:300] for line in lines if (match := _ERROR.search(line)))
        return list(dict.fromkeys(found))[:most]

    def close(self, patience: float = 30.0) -> None:
        """End it, and whatever it started: by the end of its input, and by force after ``patience`` seconds,
        or at once if it still owes an answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if self._owes else patience)
        finally:
            self._process.kill()
            self._process.wait()
            self._end_children()
            self._process.stdout.close()
            self._log.close()

    def _end_children(self) -> None:
        """They see that it is gone and tidy up, shared memory above all; what stays is ended."""
        gone = time.monotonic() + _GRACE_SECONDS
        while (left := _group(self._process.pid)) and time.monotonic() < gone + _GROUP_SECONDS:
            if time.monotonic() > gone:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _group(group: int) -> list[int]:
    """The processes of a group that still hold anything; one that waits to be reaped does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found
