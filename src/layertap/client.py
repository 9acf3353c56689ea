"""A client of ``layertap serve``: prompts in, hidden states out, many at once.

Requests run in worker threads, each of which keeps one connection.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Self
from urllib.parse import quote

from layertap import reader
from layertap.client_http import Connections, ServerError
from layertap.errors import InvalidInputError, LayertapError
from layertap.prompts import as_iterable
from layertap.record import HiddenStates, read_record

Transport = Literal["auto", "path", "http", "inline"]
OnError = Literal["raise", "return"]

__all__ = ["AsyncClient", "Client", "ServerError"]


class _Extractor:
    """What both clients share.

    Args:
        base_url: of the server, with or without ``/v1``.
        api_key: sent as a bearer token; default ``$LAYERTAP_API_KEY``.
        concurrency: requests at once.
        retries: more tries of a request that may succeed later (no answer, 429, 500, 503, 507).
        timeout: seconds that one try may take.
        transport: how records come here. ``"path"`` reads the server's files, ``"http"`` fetches them,
            ``"inline"`` takes them out of the answers, ``"auto"`` reads files that are in reach and
            fetches the others.
        keep: leave the records on the server.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        concurrency: int = 32,
        retries: int = 3,
        timeout: float = 600.0,
        transport: Transport = "auto",
        keep: bool = False,
    ) -> None:
        if transport not in ("auto", "path", "http", "inline"):
            raise InvalidInputError("transport", transport, "'auto', 'path', 'http' or 'inline'")
        if not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidInputError("concurrency", concurrency, "an integer from 1 up")
        key = api_key or os.environ.get("LAYERTAP_API_KEY")
        self._http = Connections(base_url, key, timeout, retries)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="layertap-client")
        self._ahead = 2 * concurrency
        self._transport = transport
        self._keep = keep

    def _submit(self, prompt: Any, options: dict[str, Any]) -> Future[HiddenStates]:
        return self._pool.submit(self._one, prompt, options)

    def _models(self) -> list[dict[str, Any]]:
        answer = json.loads(self._http.request("GET", "/v1/models"))
        models: list[dict[str, Any]] = answer["data"]
        return models

    def _one(self, prompt: Any, options: dict[str, Any]) -> HiddenStates:
        body: dict[str, Any] = {"max_tokens": options["max_tokens"], "temperature": 0}
        transfer = {k: v for k, v in options.items() if k != "max_tokens" and v is not None}
        if self._transport == "inline":
            transfer["inline"] = True
        body["kv_transfer_params"] = transfer
        if isinstance(prompt, Mapping):
            given = (prompt.get(name) for name in ("prompt_token_ids", "messages", "prompt"))
            prompt = next((value for value in given if value is not None), None)
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(prompt, list | tuple):  # numpy's integers among them
            prompt = [t.tolist() if hasattr(t, "tolist") else t for t in prompt]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            path, body["messages"] = "/v1/chat/completions", prompt
        else:
            path, body["prompt"] = "/v1/completions", prompt
        answer = json.loads(self._http.request("POST", path, body))
        return self._take(answer.get("kv_transfer_params") or {})

    def _take(self, handle: Mapping[str, Any]) -> HiddenStates:
        """The record behind an answer's ``kv_transfer_params``, whatever kind of handle it holds."""
        if "hidden_states" in handle:
            return _parse(base64.b64decode(handle["hidden_states"]))
        if "hidden_states_handle" in handle:
            return reader.take(handle["hidden_states_handle"])
        path, record_id = handle.get("hidden_states_path"), handle.get("hidden_states_id")
        if path is None:
            raise ServerError(200, f"the answer holds no hidden states: {dict(handle)}")
        if self._transport == "path" or (self._transport == "auto" and os.path.isfile(path)):
            states = reader.open(path)
            if not self._keep:
                reader.delete(path)  # what is mapped stays readable
            return states
        url = f"/v1/hidden_states/{quote(str(record_id), safe='')}"
        states = _parse(self._http.request("GET", url))
        if not self._keep:
            self._http.request("DELETE", url)
        return states

    def _close(self) -> None:
        self._http.closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._http.close()


def _parse(data: bytes) -> HiddenStates:
    """A record from its file's bytes: checked, and without a copy that outlives the tensors."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        return read_record(file.name)


class _Window:
    """The requests under way of one ``extract``, oldest first; leaving it cancels those that have not begun.

    Args:
        client: submits them, and says how many may be under way.
        options: of every request.
        on_error: ``"raise"``, or ``"return"`` a request's error in the place of its states.
    """

    def __init__(self, client: _Extractor, options: dict[str, Any], on_error: OnError) -> None:
        self._client = client
        self._options = options
        self._on_error = on_error
        self._pending: deque[Future[HiddenStates]] = deque()

    def submit(self, prompt: Any) -> None:
        self._pending.append(self._client._submit(prompt, self._options))

    @property
    def full(self) -> bool:
        return len(self._pending) >= self._client._ahead

    def __len__(self) -> int:
        return len(self._pending)

    def oldest(self) -> Future[HiddenStates]:
        """The request whose states are due next; no longer under way for the window."""
        return self._pending.popleft()

    def take(self, future: Future[HiddenStates]) -> HiddenStates:
        """A request's states, waiting for them if need be."""
        try:
            return future.result()
        except LayertapError as error:
            if self._on_error == "raise":
                raise
            return error  # type: ignore[return-value]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for future in self._pending:
            future.cancel()


def _options(
    layers: Any, tokens: Any, dtype: str, include_output_tokens: bool, max_tokens: int
) -> dict[str, Any]:
    if isinstance(tokens, slice):
        if tokens.step not in (None, 1):
            raise InvalidInputError("tokens", tokens, "a slice without a step")
        tokens = {"start": tokens.start, "end": tokens.stop}
    return {
        "layers": list(layers) if isinstance(layers, tuple) else layers, "tokens": tokens, "dtype": dtype,
        "include_output_tokens": include_output_tokens, "max_tokens": max_tokens,
    }  # fmt: skip


class Client(_Extractor):
    """A server's hidden states, from ordinary code. The arguments are :class:`_Extractor`'s.

    >>> with Client("http://localhost:8000") as client:
    ...     for states in client.extract(prompts, tokens="last"):
    ...         states.hidden_states    # [T, L, H]
    """

    def models(self) -> list[dict[str, Any]]:
        """The served model, under each of its names, with its layers."""
        return self._models()

    def extract(
        self,
        prompts: Any,
        *,
        layers: Any = None,
        tokens: Any = "all",
        dtype: str = "auto",
        include_output_tokens: bool = False,
        max_tokens: int = 0,
        on_error: OnError = "raise",
    ) -> Iterator[HiddenStates]:
        """Yield each prompt's hidden states, in order, while later ones still run; see ``LLM.extract``.

        Args:
            prompts: one or many, or an iterator: it is read only as far ahead as requests are under way.

        Raises:
            ServerError: a request failed for good (with ``on_error="return"`` it is yielded in its place).
        """
        options = _options(layers, tokens, dtype, include_output_tokens, max_tokens)
        return self._extract(iter(as_iterable(prompts)), _Window(self, options, on_error))

    def _extract(self, items: Iterator[Any], window: _Window) -> Iterator[HiddenStates]:
        with window:
            for item in items:
                window.submit(item)
                if window.full:
                    yield window.take(window.oldest())
            while window:
                yield window.take(window.oldest())

    def close(self) -> None:
        """End the threads and connections."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClient(_Extractor):
    """:class:`Client` for asynchronous code: ``async for states in client.extract(prompts)``."""

    async def models(self) -> list[dict[str, Any]]:
        """The served model, under each of its names, with its layers."""
        return await asyncio.wrap_future(self._pool.submit(self._models))

    async def extract(
        self,
        prompts: Any,
        *,
        layers: Any = None,
        tokens: Any = "all",
        dtype: str = "auto",
        include_output_tokens: bool = False,
        max_tokens: int = 0,
        on_error: OnError = "raise",
    ) -> AsyncIterator[HiddenStates]:
        """As :meth:`Client.extract`; ``prompts`` may also be an asynchronous iterator."""
        options = _options(layers, tokens, dtype, include_output_tokens, max_tokens)
        with _Window(self, options, on_error) as window:
            async for item in _items(prompts):
                window.submit(item)
                if window.full:
                    yield window.take(await _ended(window.oldest()))
            while window:
                yield window.take(await _ended(window.oldest()))

    async def close(self) -> None:
        """End the threads and connections."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _ended(future: Future[HiddenStates]) -> Future[HiddenStates]:
    """Wait for a request without holding up the event loop; how it ended is told by the future itself."""
    with contextlib.suppress(LayertapError):
        await asyncio.wrap_future(future)
    return future


async def _items(prompts: Any) -> AsyncIterator[Any]:
    if hasattr(prompts, "__aiter__"):
        async for item in prompts:
            yield item
        return
    for item in as_iterable(prompts):
        yield item
