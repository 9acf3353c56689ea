"""One engine process of several: ``python -m layertap.server.replica FD``.

It ends when its socket does, so that no replica outlives its server.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from functools import partial

from layertap.errors import InvalidInputError, LayertapError
from layertap.outputs import RequestOutput
from layertap.server import wire
from layertap.server.engine import EngineCall, EngineUnavailableError
from layertap.server.local import EngineThread

logger = logging.getLogger("layertap")
_STATS_SECONDS = 0.5


class Replica:
    """Runs an engine for the process at the other end of a socket."""

    def __init__(self, sock: socket.socket, engine: EngineThread) -> None:
        self._socket = sock
        self._engine = engine
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="layertap-replica-writer", daemon=True)

    def run(self) -> None:
        """Serve until the other end goes away."""
        self._writer.start()
        self._outbox.put(wire.Ready(self._engine.facts))
        while (message := wire.receive(self._socket)) is not None:
            if isinstance(message, wire.Submit):
                self._submit(message.call)
            elif isinstance(message, wire.Abort):
                self._engine.abort(message.call)
            else:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def _submit(self, call: EngineCall) -> None:
        try:
            collector = self._engine.collect(call, self._deliver)
        except InvalidInputError as error:
            self._outbox.put(wire.Refused(call.request_id, error))
            return
        self._outbox.put(wire.Accepted(call.request_id))
        try:
            self._engine.submit(collector)
        except EngineUnavailableError:
            # Its thread has failed and everything is lost: the server starts another process.
            logger.error("the engine has failed: the replica ends")
            os._exit(1)

    def _deliver(self, output: RequestOutput) -> None:
        """On the engine's thread: hand over and return."""
        self._outbox.put(wire.Output(output))

    def _write(self) -> None:
        while True:
            try:
                message: object = self._outbox.get(timeout=_STATS_SECONDS)
            except queue.Empty:
                if not self._engine.alive:
                    os._exit(1)
                message = wire.Stats(self._engine.stats())
            try:
                self._socket.sendall(wire.pack(message))
            except OSError:
                return  # the server has gone; run() sees it too


def main() -> int:
    """Read what to run from the socket, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's affair
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="layertap: replica: %(message)s", level=logging.WARNING)
    sock = socket.socket(fileno=int(sys.argv[1]))
    begin = wire.receive(sock)
    if begin is None:
        return 1
    try:
        engine = EngineThread(begin.config, begin.transfer)
    except LayertapError as error:
        sock.sendall(wire.pack(wire.Refused(None, error)))
        return 1
    # As in the server: the collector need not go through the objects of model and libraries any more.
    gc.collect()
    gc.freeze()
    Replica(sock, engine).run()
    closing = threading.Thread(target=partial(engine.close), daemon=True)
    closing.start()
    closing.join(10)
    os._exit(0)  # a step that still runs must not keep the process


if __name__ == "__main__":
    sys.exit(main())
