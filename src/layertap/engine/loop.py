"""The thread that runs the engine, and the way in and out of it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layertap.engine.core import EngineCore
from layertap.engine.request import Request
from layertap.errors import ExtractionError, LayertapError

logger = logging.getLogger("layertap")


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    done: threading.Event
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Abort:
    request: Request | str


class EngineClosedError(LayertapError, RuntimeError):
    """The engine has been closed, or its thread died."""


class EngineLoop:
    """Runs an :class:`EngineCore` in a thread of its own.

    Requests go in through :meth:`submit`; what becomes of them comes out through each request's
    ``on_output(request, finished)``, which is called on the engine's thread and must return at once.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._inbox: queue.SimpleQueue[Request | _Abort | _Call | None] = queue.SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="layertap-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            EngineClosedError: nothing will run it.
        """
        with self._lock:
            self.check()
            self._inbox.put(request)

    def abort(self, request: Request | str) -> None:
        """End a request; its ``on_output`` is called with the outcome. An id is that of whatever request has
        it; unknown ones are ignored."""
        self._inbox.put(_Abort(request))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between two steps, and return its result."""
        if threading.current_thread() is self._thread:
            return function()
        call = _Call(function, threading.Event())
        with self._lock:
            self.check()
            self._inbox.put(call)
        while not call.done.wait(0.5):
            if not self._thread.is_alive():
                raise EngineClosedError("the engine's thread has ended") from self._failure
        if call.error is not None:
            raise call.error
        return call.result

    def close(self) -> None:
        """Abort what runs and end the thread. Safe to call twice."""
        with self._lock:
            first = not self._closed
            self._closed = True
        if first:
            self._inbox.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raises:
        EngineClosedError: nothing will run any more.
        """
        if self._failure is not None:
            raise EngineClosedError(f"the engine has failed: {self._failure}") from self._failure
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _run(self) -> None:
        core = self.core
        try:
            while True:
                if not self._drain(block=not core.has_work):
                    break
                if core.has_work and not core.step() and self._inbox.empty():
                    core.wait(0.05)
        except BaseException as e:
            logger.exception("the engine has failed")
            self._failure = e
        finally:
            self._end()

    def _drain(self, block: bool) -> bool:
        """Take what has come in. False: close."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, _Abort):
                self.core.abort(item.request)
            elif isinstance(item, _Call):
                self._answer(item)
            else:
                try:
                    self.core.add_request(item)
                except LayertapError as e:
                    item.error = ExtractionError(item.request_id, str(e), "engine")
                    if item.on_output is not None:
                        item.on_output(item, True)

    @staticmethod
    def _answer(call: _Call) -> None:
        try:
            call.result = call.function()
        except BaseException as e:  # noqa: BLE001 - handed to the caller
            call.error = e
        call.done.set()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        try:
            self.core.close()
        finally:
            reason = f"the engine has failed: {self._failure}" if self._failure else "the engine was closed"
            for request in list(self.core.requests.values()):
                self._fail(request, reason)
            self.core.requests.clear()
            while True:
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if isinstance(item, Request):
                    self._fail(item, reason)
                elif isinstance(item, _Call):
                    item.error = EngineClosedError(reason)
                    item.done.set()

    @staticmethod
    def _fail(request: Request, reason: str) -> None:
        request.error = ExtractionError(request.request_id, reason, "engine")
        if request.on_output is not None:
            request.on_output(request, True)
