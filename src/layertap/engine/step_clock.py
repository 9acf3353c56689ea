"""When the steps that a GPU has been given will have ended, judged by the latest ones.

The engine launches a step while another one runs, so that the GPU never waits. Launched too early it has few
requests in it: those that arrive a moment later go into the next one, and steps stay small. So the engine
waits with a step that is not full until the one that runs is about to end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_REMEMBERED = 8
_LAUNCHES = 4
_EXACT_SECONDS = 0.006  # a step that was running so short a time ago has ended about now
_SPARE_SECONDS = 0.004


@dataclass(slots=True)
class _Running:
    num_tokens: int
    ended: Callable[[], bool]


class StepClock:
    """Told of each launch, and asked often, it knows how long a token takes. Used by one thread.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running: deque[_Running] = deque()
        self._token_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._launch_seconds: deque[float] = deque(maxlen=_LAUNCHES)
        self._since = 0.0
        """When the device came to the first running step, or a moment before."""
        self._exact = False
        """It is that moment."""
        self._looked = 0.0

    def launched(self, num_tokens: int, begun: float, ended: Callable[[], bool]) -> None:
        """A step has been launched.

        Args:
            num_tokens: that the device computes.
            begun: when the launch began.
            ended: whether the device is done with it.
        """
        now = self._now()
        self._launch_seconds.append(now - begun)
        if not self._running:
            self._since, self._exact = begun, True
        self._running.append(_Running(num_tokens, ended))
        self._looked = now

    def look(self, waited: bool = False) -> None:
        """See what has ended.

        Args:
            waited: the caller has waited for the first of the running steps, until now.
        """
        now = self._now()
        exact = waited or now - self._looked <= _EXACT_SECONDS
        while self._running and self._running[0].ended():
            step = self._running.popleft()
            if exact and self._exact:
                self._token_seconds.append((now - self._since) / step.num_tokens)
            # Another one that has ended meanwhile began at some time since the last look.
            self._since, self._exact = (now if exact else self._looked), exact
            exact = False
        self._looked = now

    def seconds_to_spare(self) -> float:
        """How long the next launch can wait and still be in time; 0 where nothing runs, or nothing is
        known."""
        if not self._running or not self._token_seconds:
            return 0.0
        tokens = sum(step.num_tokens for step in self._running)
        # The fastest of the latest steps: a launch that is early costs less than a GPU that waits.
        end = self._since + tokens * min(self._token_seconds)
        return max(0.0, end - self._now() - 2 * max(self._launch_seconds) - _SPARE_SECONDS)
