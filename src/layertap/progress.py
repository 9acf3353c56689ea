"""Progress: prompts, tokens a second, bytes written. A bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from layertap.engine.memory import format_bytes


class Progress:
    """A context manager; :meth:`advance` is called once for each finished prompt.

    Args:
        total: number of prompts, if known.
        shown: False draws nothing.
        every: seconds after which a line is written instead, again and again; None writes none.
    """

    def __init__(
        self, total: int | None, shown: bool, description: str = "prompts", every: float | None = None
    ) -> None:
        self.total = total
        self._description = description
        self._every = every
        self._lines = 0
        self.tokens = 0
        self.bytes = 0
        self.prompts = 0
        self.started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn(description), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(), console=Console(file=sys.stderr),
            )  # fmt: skip
            self._task = self._bar.add_task(description, total=total, rate="")

    def advance(self, tokens: int, written: int = 0) -> None:
        """One more prompt is finished.

        Args:
            tokens: its prompt tokens.
            written: bytes of states delivered for it.
        """
        self.prompts += 1
        self.tokens += tokens
        self.bytes += written
        if self._bar is not None:
            self._bar.update(self._task, advance=1, rate=self.rate())
        elif self._every is not None and self.seconds >= (self._lines + 1) * self._every:
            self._lines = int(self.seconds / self._every)
            print(f"layertap: {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """``"1,200 of 10,000 prompts, 3,120 tokens/s, 1.2 GiB, about 12 min left"``"""
        of = "" if self.total is None else f" of {self.total:,}"
        text = f"{self.prompts:,}{of} {self._description}, {self.rate()}"
        if self.total is None or not self.prompts:
            return text
        left = self.seconds / self.prompts * max(0, self.total - self.prompts)
        return (
            f"{text}, about {left / 60:,.0f} min left" if left >= 60 else f"{text}, about {left:.0f} s left"
        )

    def rate(self) -> str:
        """``"3,120 tokens/s, 1.2 GiB"``"""
        text = f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
        return f"{text}, {format_bytes(self.bytes)}" if self.bytes else text

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
