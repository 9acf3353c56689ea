"""Behind ``LLM.extract``: prompts go in as far ahead as a buffer allows, states come out in order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layertap import reader
from layertap.checked_ahead import of_prompt
from layertap.engine.collector import OutputCollector
from layertap.engine.standing_heap import standing_heap
from layertap.errors import ExtractionError, InvalidInputError
from layertap.outputs import RequestOutput, handle_of
from layertap.progress import Progress
from layertap.record import HiddenStates
from layertap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from layertap.llm import LLM, OnError

LEAST_BUFFER_BYTES = 1 << 28


@dataclass(slots=True)
class _Pending:
    """A prompt whose states nobody has taken yet."""

    index: int
    collector: OutputCollector | None = None
    num_bytes: int = 0
    """What its states take in the buffer."""
    error: InvalidInputError | None = None
    """Why it never ran."""


class Extraction:
    """One call of ``LLM.extract``.

    Args:
        prompts: read only as far ahead as the buffer allows.
        names: a request id for each prompt; None makes some up.
        on_error: see ``LLM.extract``.
        bytes_per_token: what the states of a kept token take.
        buffer_bytes: most bytes of states under way or waiting to be taken.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Iterator[Any],
        params: SamplingParams,
        names: Iterator[str] | None,
        on_error: OnError,
        bytes_per_token: int,
        buffer_bytes: int,
    ) -> None:
        self._llm = llm
        self._prompts = enumerate(prompts)
        self._params = params
        self._names = names
        self._on_error = on_error
        self._bytes_per_token = bytes_per_token
        self._buffer_bytes = buffer_bytes
        self._buffered = 0
        self._exhausted = False
        self._pending: deque[_Pending] = deque()
        self._done: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()
        self._ready: dict[int, RequestOutput] = {}

    def run(self, use_tqdm: bool) -> Iterator[HiddenStates]:
        """Yield each prompt's states in order; with ``on_error="return"`` an
        :class:`~layertap.errors.ExtractionError` in the place of one that failed."""
        with standing_heap() as note, Progress(None, shown=use_tqdm) as progress:
            try:
                while True:
                    self._fill(note)
                    if not self._pending:
                        return
                    outcome, tokens, num_bytes = self._next()
                    if isinstance(outcome, Exception):
                        self._buffered -= num_bytes
                        if self._on_error == "raise":
                            raise outcome
                        yield outcome  # type: ignore[misc]
                        continue
                    progress.advance(tokens, outcome.hidden_states.nbytes)
                    yield outcome
                    # The caller has asked for the next one: the buffer counts what nobody has taken yet.
                    self._buffered -= num_bytes
            finally:
                self._end()

    def _fill(self, note: Callable[[int], None]) -> None:
        """Submit prompts until the buffer is spoken for. ``note`` is told how many there have been."""
        while not self._exhausted and (self._buffered < self._buffer_bytes or not self._pending):
            following = next(self._prompts, None)
            if following is None:
                self._exhausted = True
                return
            index, prompt = following
            note(index + 1)
            name = next(self._names) if self._names is not None else self._llm._next_id()
            pending = _Pending(index)
            try:
                tokenized = self._llm.prompt_tokenizer(prompt, f"prompts[{index}]")
                collector = self._llm._collector(name, tokenized, self._params, index, self._done)
                pending.num_bytes = max(
                    1, self._bytes_per_token * _kept(self._params, len(tokenized.token_ids))
                )
                self._llm._submit(collector)
                pending.collector = collector
            except InvalidInputError as error:
                pending.error = of_prompt(error, index)
                self._exhausted = self._on_error == "raise"  # nobody would take what comes after
            self._pending.append(pending)
            self._buffered += pending.num_bytes

    def _next(self) -> tuple[HiddenStates | Exception, int, int]:
        """What became of the first prompt that waits, its tokens, and its bytes of the buffer."""
        first = self._pending[0]
        if first.error is None:
            while first.index not in self._ready:
                index, output = self._done.get()
                self._ready[index] = output
        self._pending.popleft()
        if first.error is not None:
            return self._refusal(first.index, first.error), 0, first.num_bytes
        output = self._ready.pop(first.index)
        if output.error is not None:
            return output.error, 0, first.num_bytes
        handle = handle_of(output.kv_transfer_params)
        assert handle is not None
        return reader.take(handle), len(output.prompt_token_ids), first.num_bytes

    def _refusal(self, index: int, error: InvalidInputError) -> Exception:
        if self._on_error == "raise":
            if index:
                error.add_note(f"The states of all prompts before it ({index}) have been yielded.")
            return error
        wrapped = ExtractionError(f"{index}", str(error), "invalid_input")
        wrapped.__cause__ = error
        return wrapped

    def _end(self) -> None:
        """Abort what runs; forget the states that were delivered before the abort reached them."""
        running = [p for p in self._pending if p.collector is not None]
        self._llm._abort([p.collector for p in running if p.collector is not None])
        for output in self._ready.values():
            _forget(output)
        for _ in range(sum(p.index not in self._ready for p in running)):
            try:
                _, output = self._done.get(timeout=10)
            except queue.Empty:
                return
            _forget(output)


def _forget(output: RequestOutput) -> None:
    handle = handle_of(output.kv_transfer_params)
    if handle is not None and handle.startswith("memory://"):
        reader.delete(handle)


def _kept(params: SamplingParams, num_prompt_tokens: int) -> int:
    """At most so many tokens' states are kept."""
    tokens = (params.kv_transfer_params or {}).get("tokens", "all")
    if tokens == "last":
        return 1
    if isinstance(tokens, list | tuple):
        return len(tokens)
    if isinstance(tokens, Mapping):
        return len(range(*slice(tokens.get("start"), tokens.get("end")).indices(num_prompt_tokens)))
    return num_prompt_tokens + (params.max_tokens if params.kv_transfer_params else 0)
