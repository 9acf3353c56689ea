"""What is new in a sequence since the last look, for streaming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from layertap.outputs import CompletionOutput, RequestOutput
from layertap.server.engine import EngineCall
from layertap.server.logprobs import Row


@dataclass(slots=True)
class Delta:
    """The news of one sequence."""

    index: int
    """Of the choice in the whole answer."""
    call: int
    """Of the prompt."""
    first: bool
    text: str
    token_ids: list[int]
    logprobs: list[Row] | None
    finish_reason: str | None
    stop_reason: int | str | None
    kv_transfer_params: dict[str, Any] | None
    offset: int
    """Characters of this sequence before ``text``."""


@dataclass(slots=True)
class _Seen:
    characters: int = 0
    tokens: int = 0
    started: bool = False
    finished: bool = False


class DeltaTracker:
    """Turns whole outputs into their news. An end of text that may yet become a stop string is held back."""

    def __init__(self, calls: list[EngineCall]) -> None:
        self._calls = calls
        self._seen = [[_Seen() for _ in range(c.params.n)] for c in calls]
        self._held = [max((len(s) - 1 for s in c.params.stop_strings), default=0) for c in calls]

    def news(self, call: int, output: RequestOutput) -> Iterator[Delta]:
        """What ``output``, of the call with this index, adds."""
        first = sum(c.params.n for c in self._calls[:call])
        for completion in output.outputs:
            seen = self._seen[call][completion.index]
            delta = self._delta(first + completion.index, call, completion, seen)
            if delta is not None:
                yield delta

    def _delta(self, index: int, call: int, completion: CompletionOutput, seen: _Seen) -> Delta | None:
        done = completion.finish_reason is not None
        if seen.finished:
            return None
        held = 0 if done else self._held[call]
        end = max(seen.characters, len(completion.text) - held)
        text = completion.text[seen.characters : end]
        tokens = completion.token_ids[seen.tokens :]
        if not done and not text and not tokens:
            return None
        delta = Delta(
            index=index,
            call=call,
            first=not seen.started,
            text=text,
            token_ids=tokens,
            logprobs=None if completion.logprobs is None else completion.logprobs[seen.tokens :],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            kv_transfer_params=completion.kv_transfer_params,
            offset=seen.characters,
        )
        seen.characters = end
        seen.tokens = len(completion.token_ids)
        seen.started = True
        seen.finished = done
        return delta
