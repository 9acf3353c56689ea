"""Where the time of a start goes."""

from __future__ import annotations

import time


class StartPhases:
    """Seconds of each phase, in the order in which they came."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def end(self, name: str) -> None:
        """The phase that has run since the last call, or since the beginning, was this one."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"
