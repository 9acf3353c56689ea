"""A progress line on the terminal: prompts, tokens a second, bytes written."""

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
    """

    def __init__(self, total: int | None, shown: bool, description: str = "prompts") -> None:
        self.total = total
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
