"""What the HTTP side asks of an engine, wherever it runs: in a thread of this process, or in others."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layertap.connectors.file import FileConnector
from layertap.engine.core import EngineCore
from layertap.errors import ExtractionError, LayertapError
from layertap.layers import ServedLayers
from layertap.outputs import RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams

ENGINE_DIED = "engine_died"
"""The kind of :class:`~layertap.errors.ExtractionError` that a request gets when its engine process ends."""


class EngineUnavailableError(LayertapError, RuntimeError):
    """No engine can take a request now: it is starting, shutting down, or has died."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One prompt on its way to an engine, with ``params.n`` sequences to come back."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    stream: bool = False
    """Report after each token, not only at the end."""
    cache_salt: str = ""

    @property
    def record_ids(self) -> list[str]:
        """The ids of the sequences, which their records are named after."""
        if self.params.n == 1:
            return [self.request_id]
        return [f"{self.request_id}-{i}" for i in range(self.params.n)]

    @property
    def num_tokens(self) -> int:
        """Tokens that it may cost, for dispatch."""
        return len(self.prompt.token_ids) + self.params.n * self.params.max_tokens


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What never changes about an engine."""

    model: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    itemsize: int
    """Bytes of one value in the hidden-state cache."""
    layers: ServedLayers | None
    storage_path: str | None
    """The folder of the file connector; None with any other connector."""
    device: str

    @classmethod
    def of(cls, core: EngineCore) -> EngineFacts:
        verifier = core.verifier
        connector = core.connector
        return cls(
            model=core.config.model,
            max_model_len=core.max_model_len,
            vocab_size=verifier.vocab_size,
            hidden_size=verifier.hidden_size,
            dtype=str(verifier.dtype).removeprefix("torch."),
            itemsize=verifier.dtype.itemsize,
            layers=core.served,
            storage_path=str(connector.sink.storage_path)  # type: ignore[attr-defined]
            if isinstance(connector, FileConnector)
            else None,
            device=str(core.device),
        )


class OutputStream:
    """The outputs of one call, each of them all that there is so far. Used on the event loop.

    A reader that is slower than the engine sees only the newest: nothing piles up.
    """

    def __init__(self, call: EngineCall) -> None:
        self.call = call
        self._newest: RequestOutput | None = None
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self._newest is not None and self._newest.finished

    def put(self, output: RequestOutput) -> None:
        if not self.finished:
            self._newest = output
            self._arrived.set()

    def fail(self, reason: str, kind: str) -> None:
        """End the stream with an error of our own making."""
        error = ExtractionError(self.call.request_id, reason, kind)
        prompt = self.call.prompt
        self.put(RequestOutput(self.call.request_id, prompt.text, prompt.token_ids, [], True, error=error))

    async def next(self) -> RequestOutput:
        """The newest output that has not been seen, or the last one again."""
        if not self.finished:
            await self._arrived.wait()
        self._arrived.clear()
        assert self._newest is not None
        return self._newest

    async def final(self) -> RequestOutput:
        """The last output."""
        while True:
            output = await self.next()
            if output.finished:
                return output


class AsyncEngine(ABC):
    """An engine, or several behind one face. All methods are called on the event loop."""

    facts: EngineFacts

    @abstractmethod
    async def start(self) -> None:
        """Begin to take calls."""

    @abstractmethod
    async def submit(self, calls: Sequence[EngineCall]) -> list[OutputStream]:
        """Check calls and queue them: all of them or, if one is wrong, none.

        Raises:
            InvalidInputError: one of them is wrong.
            EngineUnavailableError: nothing can run them now.
        """

    @abstractmethod
    def abort(self, call: EngineCall) -> None:
        """End a call. Its stream still gets a last output."""

    @abstractmethod
    def stats(self) -> dict[str, dict[str, Any]]:
        """Each replica's counters and gauges, by its name."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """It can take calls now, or will without help from outside."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """It can take calls now."""

    @abstractmethod
    async def close(self) -> None:
        """Abort what runs and end every thread and process."""
