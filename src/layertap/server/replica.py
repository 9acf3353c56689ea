"""One engine process: ``main()``, with a socket's descriptor as the last argument.

It ends when its socket does, so that no replica outlives its server.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial

from layertap.engine.collector import OutputCollector
from layertap.engine.loader import first_line
from layertap.errors import ExtractionError, InvalidInputError, LayertapError
from layertap.outputs import RequestOutput
from layertap.server import wire
from layertap.server.engine import EngineCall, EngineUnavailableError
from layertap.server.local import EngineThread

logger = logging.getLogger("layertap")
_STATS_SECONDS = 0.5
_WATCH_SECONDS = 0.2
_JOINED_BYTES = 1 << 18
"""Messages that wait are sent together up to so many bytes."""


class Replica:
    """Runs an engine for the process at the other end of a socket."""

    def __init__(self, sock: socket.socket, engine: EngineThread) -> None:
        self._socket = sock
        self._engine = engine
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._held: dict[str, OutputCollector] = {}
        """Checked calls that wait for others of their request."""
        self._stats_level = logging.ERROR
        self._writer = threading.Thread(target=self._write, name="layertap-replica-writer", daemon=True)

    def run(self) -> None:
        """Serve until the other end goes away."""
        self._outbox.put(wire.Ready(self._engine.facts))
        self._writer.start()
        while (message := wire.receive(self._socket)) is not None:
            if isinstance(message, wire.Submit):
                self._check(message.call, message.hold)
            elif isinstance(message, wire.Run):
                self._submit(self._held.pop(message.call_id))
            elif isinstance(message, wire.Abort):
                if self._held.pop(message.call.request_id, None) is None:
                    self._engine.abort(message.call)
            else:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def _check(self, call: EngineCall, hold: bool) -> None:
        try:
            collector = self._engine.collect(call, self._deliver)
        except InvalidInputError as error:
            self._outbox.put(wire.Refused(call.request_id, wire.sendable(error)))
            return
        except Exception as error:  # of a connector's check, say: the other requests go on
            logger.exception("request %s could not be checked", call.request_id)
            reason = f"the engine could not check it ({type(error).__name__}: {error})"
            self._outbox.put(wire.Refused(call.request_id, ExtractionError(call.request_id, reason)))
            return
        self._outbox.put(wire.Accepted(call.request_id))
        if hold:
            self._held[call.request_id] = collector
        else:
            self._submit(collector)

    def _submit(self, collector: OutputCollector) -> None:
        try:
            self._engine.submit(collector)
        except EngineUnavailableError:
            # Its thread has failed and everything is lost: the server starts another process.
            logger.error("the engine has failed: the replica ends")
            os._exit(1)

    def _deliver(self, output: RequestOutput) -> None:
        """On the engine's thread: hand over and return."""
        self._outbox.put(wire.Output(replace(output, prompt=None, prompt_token_ids=[])))

    def _write(self) -> None:
        try:
            self._send_until_gone()
        except BaseException:
            logger.exception("nothing can be sent any more: the replica ends")
            os._exit(1)

    def _send_until_gone(self) -> None:
        """What waits goes out together; statistics when they are due, whatever else there is to send."""
        due = time.monotonic()  # the first ones right behind what waits already
        alive = True
        while True:
            data = self._waiting(due - time.monotonic())
            if time.monotonic() >= due:
                if not alive:
                    os._exit(1)  # what a failed engine had to say has gone out since the last time
                alive = self._engine.alive
                data += self._statistics()
                due = time.monotonic() + _STATS_SECONDS
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the server has gone; run() sees it too

    def _waiting(self, seconds: float) -> bytearray:
        data = bytearray()
        try:
            data += _packed(self._outbox.get(timeout=max(0.0, seconds)))
            while len(data) < _JOINED_BYTES:
                data += _packed(self._outbox.get_nowait())
        except queue.Empty:
            pass
        return data

    def _statistics(self) -> bytes:
        try:
            return wire.pack(wire.Stats(self._engine.stats()))
        except Exception:  # of a connector, say: its requests do not suffer
            logger.log(self._stats_level, "the engine's statistics cannot be had", exc_info=True)
            self._stats_level = logging.DEBUG  # told once
            return b""


def _packed(message: object) -> bytes:
    """A message's bytes; for an output that cannot be sent, those of an error in its place."""
    try:
        return wire.pack(message)
    except Exception as error:
        if not isinstance(message, wire.Output):
            raise
        output = message.output
        logger.exception("request %s: its output cannot be sent to the server", output.request_id)
        if not output.finished:
            return b""  # the last one tells: the server takes a finished request for gone
        reason = f"its output cannot be sent to the server ({type(error).__name__}: {error})"
        failed = ExtractionError(output.request_id, reason)
        return wire.pack(wire.Output(RequestOutput(output.request_id, None, [], [], True, error=failed)))


def _watch(sock: socket.socket, loaded: threading.Event) -> None:
    """While the model loads, nobody reads from the socket: end here if the server goes."""
    while not loaded.wait(_WATCH_SECONDS):
        with contextlib.suppress(BlockingIOError):
            if not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                os._exit(1)


def main() -> int:
    """Read what to run from the socket, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's affair
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="layertap: replica: %(message)s", level=logging.WARNING)
    sock = socket.socket(fileno=int(sys.argv[-1]))
    begin = wire.receive(sock)
    if begin is None:
        return 1
    logger.setLevel(begin.log_level)
    loaded = threading.Event()
    threading.Thread(target=_watch, args=(sock, loaded), daemon=True).start()
    try:
        engine = EngineThread(begin.config, begin.transfer)
    except LayertapError as error:
        sock.sendall(wire.pack(wire.Refused(None, wire.sendable(error))))
        return 1
    except Exception as error:  # told in a line, as the command tells those of its own process
        logger.debug("the engine cannot start", exc_info=True)
        reason = f"{type(error).__name__}: {first_line(error)} (--verbose shows where)"
        sock.sendall(wire.pack(wire.Refused(None, LayertapError(reason))))
        return 1
    loaded.set()
    # As in the server: the collector need not go through the objects of model and libraries any more.
    gc.collect()
    gc.freeze()
    Replica(sock, engine).run()
    closing = threading.Thread(target=partial(engine.close), daemon=True)
    closing.start()
    closing.join(10)
    os._exit(0)  # a step that still runs must not keep the process
