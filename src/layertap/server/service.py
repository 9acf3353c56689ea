"""What the routes share, and the flight of one HTTP request's calls through the engine."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from layertap.errors import InvalidInputError
from layertap.outputs import RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection
from layertap.server.engine import AsyncEngine, EngineCall, OutputStream
from layertap.server.http_errors import ApiError
from layertap.server.metrics import Metrics
from layertap.server.storage import Storage, record_id_of
from layertap.server.tokenizing import Tokenizing
from layertap.sinks.file import REQUEST_ID

logger = logging.getLogger("layertap")

PATH = "hidden_states_path"
_HEADER_BYTES = 4096


@dataclass(slots=True)
class Limits:
    """What one request may ask for."""

    max_body_bytes: int = 64 << 20
    max_inline_bytes: int = 16 << 20
    max_logprobs: int = 20
    max_sequences: int = 8192


class Service:
    """The state behind the routes.

    Args:
        engine: one, or replicas.
        tokenizing: the HTTP side's tokenizer.
        model_names: ids under which the model is served; answers carry the first.
        storage: of the file connector; None with any other.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizing: Tokenizing,
        model_names: Sequence[str],
        storage: Storage | None,
        limits: Limits | None = None,
    ) -> None:
        self.engine = engine
        self.facts = engine.facts
        self.tokenizing = tokenizing
        self.model_names = list(model_names)
        self.storage = storage
        self.limits = limits or Limits()
        self.metrics = Metrics(engine, storage)
        self._cleaning: set[asyncio.Task[None]] = set()

    def check_model(self, model: str | None) -> str:
        """The name that the answer carries.

        Raises:
            ApiError: 404, it is not served here.
        """
        if model is None or model in self.model_names:
            return self.model_names[0]
        names = ", ".join(repr(n) for n in self.model_names)
        raise ApiError(
            404, f"model: {model!r} is not served here, only {names}", param="model", code="model_not_found"
        )

    def request_names(self, prefix: str, given: str | None) -> tuple[str, str]:
        """The id that the answer carries, and the stem of its records' names, which no client chooses.

        Raises:
            InvalidInputError: ``given`` is not a plain name.
        """
        stem = f"{prefix}-{uuid.uuid4().hex}"
        if given is None:
            return stem, stem
        if not REQUEST_ID.fullmatch(given):
            raise InvalidInputError("request_id", given, "1 to 200 letters, digits and _ . : = + @ -")
        return f"{prefix}-{given}", stem

    def transfer_params(self, given: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
        """A request's ``kv_transfer_params`` without the server's part, and whether to answer inline."""
        if given is None:
            return None, False
        rest = dict(given)
        inline = rest.pop("inline", None)
        if inline is not None and not isinstance(inline, bool):
            raise InvalidInputError("kv_transfer_params.inline", inline, "true or false")
        if inline and self.storage is None:
            raise InvalidInputError("kv_transfer_params.inline", True, "false: this server stores no files")
        if self.facts.layers is not None:
            Selection.parse(rest, self.facts.layers)
        return rest or None, bool(inline)

    def record_bytes(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The most bytes that the records of one call take; 0 where nothing is stored."""
        layers = self.facts.layers
        if layers is None or self.storage is None:
            return 0
        selection = Selection.parse(params.kv_transfer_params, layers)
        length = num_prompt_tokens + (params.max_tokens if selection.include_output_tokens else 0)
        itemsize = {"auto": self.facts.itemsize, "float32": 4, "float8_e4m3fn": 1}.get(selection.dtype, 2)
        row = len(selection.columns) * self.facts.hidden_size * itemsize + 12
        return params.n * (len(selection.positions(length)) * row + _HEADER_BYTES)

    def flight(
        self, stem: str, items: Sequence[tuple[TokenizedPrompt, SamplingParams]], **kwargs: Any
    ) -> Flight:
        """The calls of one HTTP request, to be used as an asynchronous context."""
        return Flight(self, [EngineCall(f"{stem}-{i}", p, s, **kwargs) for i, (p, s) in enumerate(items)])

    def clean(self, stream: OutputStream) -> None:
        """Abort a call that nobody waits for any more, and remove what it may have stored already."""
        if not stream.finished:
            self.engine.abort(stream.call)
        task = asyncio.get_running_loop().create_task(self._clean(stream))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _clean(self, stream: OutputStream) -> None:
        await stream.final()
        if self.storage is None:
            return
        try:
            if self.facts.layers is not None:
                for record_id in stream.call.record_ids:
                    await asyncio.to_thread(self.storage.delete, record_id)
        finally:
            self.storage.release(0, stream.call.record_ids)

    async def settle(self, seconds: float) -> None:
        """Wait for aborted calls to be gone, so long at most."""
        deadline = time.monotonic() + seconds
        while self._cleaning and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(list(self._cleaning), timeout=left)


class Flight:
    """The calls of one HTTP request. What is not marked as delivered at the end is aborted and removed."""

    def __init__(self, service: Service, calls: Sequence[EngineCall]) -> None:
        self.service = service
        self.calls = calls
        self.streams: list[OutputStream] = []
        self._reserved = 0
        self._delivered: set[int] = set()

    async def __aenter__(self) -> Flight:
        s = self.service
        if sum(call.params.n for call in self.calls) > s.limits.max_sequences:
            raise InvalidInputError(
                "n", self.calls[0].params.n, f"at most {s.limits.max_sequences} sequences in one call"
            )
        needed = sum(s.record_bytes(len(c.prompt.token_ids), c.params) for c in self.calls)
        if s.storage is not None:
            await s.storage.reserve(needed, [name for call in self.calls for name in call.record_ids])
        self._reserved = needed
        try:
            self.streams = await s.engine.submit(self.calls)
        except BaseException:
            self._release(self.calls)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def leave(self) -> None:
        """End the flight. A second time, nothing happens."""
        streams, self.streams = self.streams, []
        for i, stream in enumerate(streams):
            if i not in self._delivered:
                self.service.clean(stream)
        self._release([stream.call for i, stream in enumerate(streams) if i in self._delivered])

    def _release(self, ended: Sequence[EngineCall]) -> None:
        """``ended``: calls whose records are done, one way or the other."""
        if self.service.storage is not None:
            self.service.storage.release(self._reserved, [name for call in ended for name in call.record_ids])
        self._reserved = 0

    def delivered(self, index: int) -> None:
        """The client has been told where the records of this call are: they are its own now."""
        self._delivered.add(index)

    async def finals(self) -> list[RequestOutput]:
        """The last output of every call.

        Raises:
            ExtractionError: one of them failed.
        """
        outputs = [await stream.final() for stream in self.streams]
        for output in outputs:
            self.service.metrics.finished(output)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Outputs as they come, with the index of their call; each call's last one has ``finished`` set."""
        waiting = {asyncio.ensure_future(s.next()): i for i, s in enumerate(self.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    output = task.result()
                    if output.finished:
                        self.service.metrics.finished(output)
                    else:
                        waiting[asyncio.ensure_future(self.streams[index].next())] = index
                    yield index, output
        finally:
            for task in waiting:
                task.cancel()

    async def handle(self, params: dict[str, Any] | None, inline: bool) -> dict[str, Any] | None:
        """A sequence's ``kv_transfer_params`` as the client gets them."""
        storage = self.service.storage
        if params is None or storage is None or PATH not in params:
            return params
        record_id = record_id_of(params[PATH])
        if not inline:
            return {**params, "hidden_states_id": record_id}
        data = await asyncio.to_thread(storage.read, record_id)
        await asyncio.to_thread(storage.delete, record_id)
        encoded = await asyncio.to_thread(base64.b64encode, data)
        return {"hidden_states": encoded.decode(), "hidden_states_format": "safetensors"}

    def check_inline(self) -> None:
        """Raises:
        InvalidInputError: the request is not one small sequence.
        """
        field = "kv_transfer_params.inline"
        call = self.calls[0]
        if len(self.calls) > 1 or call.params.n > 1:
            raise InvalidInputError(field, True, "false with several prompts or n above 1")
        needed = self.service.record_bytes(len(call.prompt.token_ids), call.params)
        most = self.service.limits.max_inline_bytes
        if needed > most:
            raise InvalidInputError(
                field,
                True,
                f"records of at most {most} bytes (--max-inline-bytes), this one would take up to {needed}; "
                "select fewer tokens or layers, or fetch it from /v1/hidden_states/{id}",
            )
