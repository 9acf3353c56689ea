"""The engine in a thread of the server's own process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from layertap.config import EngineConfig
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.engine.collector import OutputCollector
from layertap.engine.core import EngineCore
from layertap.engine.loop import EngineClosedError, EngineLoop
from layertap.outputs import RequestOutput
from layertap.server.engine import AsyncEngine, EngineCall, EngineFacts, EngineUnavailableError, OutputStream

_INLINE_TOKENS = 8192
"""Prompts of up to so many tokens in all are checked on the event loop: that costs less than a thread."""


class EngineThread:
    """An :class:`EngineCore`, its thread, and the calls that are under way. Safe to use from any thread."""

    def __init__(self, config: EngineConfig, transfer: KVTransferConfig | None) -> None:
        self.core = EngineCore(config, transfer)
        self.facts = EngineFacts.of(self.core)
        self._loop = EngineLoop(self.core)

    def collect(self, call: EngineCall, on_output: Callable[[RequestOutput], None]) -> OutputCollector:
        """Check a call and build its engine requests.

        Raises:
            InvalidInputError: it is wrong.
        """
        return OutputCollector(
            self.core, call.request_id, call.prompt, call.params, on_output, call.stream, call.cache_salt
        )

    def submit(self, collector: OutputCollector) -> None:
        """Queue a checked call.

        Raises:
            EngineUnavailableError: the engine has ended.
        """
        try:
            for request in collector.requests:
                self._loop.submit(request)
        except EngineClosedError as e:
            raise EngineUnavailableError(str(e)) from e

    def abort(self, call: EngineCall) -> None:
        for request_id in call.record_ids:
            self._loop.abort(request_id)

    @property
    def alive(self) -> bool:
        return self._loop.alive

    def stats(self) -> dict[str, Any]:
        # Read beside the engine's thread: plain counters, and a scrape must not wait for a step.
        return self.core.stats()

    def close(self) -> None:
        self._loop.close()


class LocalEngine(AsyncEngine):
    """One engine, in a thread of this process."""

    def __init__(self, config: EngineConfig, transfer: KVTransferConfig | None) -> None:
        self._engine = EngineThread(config, transfer)
        self.facts = self._engine.facts
        self.tokenizer = self._engine.core.tokenizer
        self._aloop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[tuple[OutputStream, RequestOutput]] = deque()
        self._waking = False
        """The event loop has been told of what has arrived, and has not looked yet."""

    async def start(self) -> None:
        self._aloop = asyncio.get_running_loop()

    async def submit(self, calls: Sequence[EngineCall]) -> list[OutputStream]:
        if not self.ready:
            raise EngineUnavailableError("the engine has ended")
        streams = [OutputStream(call) for call in calls]
        if sum(len(call.prompt.token_ids) for call in calls) > _INLINE_TOKENS:
            collectors = await asyncio.to_thread(self._collect, streams)
        else:
            collectors = self._collect(streams)
        for collector in collectors:
            self._engine.submit(collector)
        return streams

    def _collect(self, streams: Sequence[OutputStream]) -> list[OutputCollector]:
        return [self._engine.collect(s.call, partial(self._deliver, s)) for s in streams]

    def _deliver(self, stream: OutputStream, output: RequestOutput) -> None:
        """On the engine's thread. A step's outputs wake the event loop once."""
        assert self._aloop is not None
        self._arrived.append((stream, output))
        if not self._waking:
            self._waking = True
            self._aloop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        # First, so that whatever arrives after the last look wakes the loop again.
        self._waking = False
        while self._arrived:
            stream, output = self._arrived.popleft()
            stream.put(output)

    def abort(self, call: EngineCall) -> None:
        self._engine.abort(call)

    def stats(self) -> dict[str, dict[str, Any]]:
        return {"0": self._engine.stats()}

    @property
    def alive(self) -> bool:
        return self._engine.alive

    @property
    def ready(self) -> bool:
        return self._aloop is not None and self._engine.alive

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)
