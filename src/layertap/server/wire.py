"""Messages between the server and its replicas: pickles, each after its length, over a private socket pair.

Both ends are this package in the same installation, and the socket has no name that anyone else could open.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from layertap.config import EngineConfig
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.errors import InvalidInputError, LayertapError
from layertap.outputs import RequestOutput
from layertap.server.engine import EngineCall, EngineFacts

logger = logging.getLogger("layertap")

_LENGTH = struct.Struct("!Q")
_INLINE_BYTES = 1 << 20
"""Longer messages are unpickled beside the event loop."""


@dataclass(frozen=True, slots=True)
class Begin:
    """To the replica, first: what to run."""

    config: EngineConfig
    transfer: KVTransferConfig | None
    log_level: int
    """Of the server's log, and so of the replica's."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the replica, once the model is loaded."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Refused:
    """From the replica: it cannot start, or a call is wrong."""

    call_id: str | None
    error: Exception


@dataclass(frozen=True, slots=True)
class Accepted:
    """From the replica: a call is queued."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """To the replica: check a call and run it."""

    call: EngineCall
    hold: bool = False
    """Run it only when :class:`Run` says so: with others that are still being checked."""


@dataclass(frozen=True, slots=True)
class Run:
    """To the replica: go on with a call that was held."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    call: EngineCall


@dataclass(frozen=True, slots=True)
class Output:
    """From the replica: without the prompt, which the server has."""

    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Stats:
    """From the replica, now and then."""

    values: dict[str, Any]


def pack(message: object) -> bytes:
    """A message's bytes on the wire."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def sendable(error: LayertapError) -> LayertapError:
    """The error, if the other end can read it; a plain one of its kind if not, as where a class of its own
    has a constructor of its own."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as failure:  # noqa: BLE001 - the error itself is what is told
        logger.debug("%s does not pickle: %s", type(error).__name__, failure)
        if isinstance(error, InvalidInputError):
            return InvalidInputError(error.field, str(error.value), error.allowed)
        return LayertapError(str(error))
    return error


def receive(sock: socket.socket) -> Any | None:
    """The next message, waiting for it; None when the other end has gone."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    data = _exactly(sock, _LENGTH.unpack(head)[0])
    return None if data is None else pickle.loads(data)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            piece = sock.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not piece:
            return None
        parts += piece
    return bytes(parts)


class _PickleFile:
    """A long pickle as a file written in Python: the unpickler comes back to the interpreter for each frame
    of 64 KiB, and other threads get their turn. From bytes it would keep them all waiting until its end."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._position = 0

    def read(self, count: int) -> bytes:
        start = self._position
        self._position += count
        return bytes(self._data[start : self._position])

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("a line in a pickle of the highest protocol, which has none")


def _load_long(data: bytes) -> Any:
    return pickle.Unpickler(_PickleFile(data)).load()


async def areceive(reader: asyncio.StreamReader) -> Any | None:
    """:func:`receive` on the event loop, which goes on while a long message is unpickled."""
    try:
        length = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
        data = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pickle.loads(data) if length <= _INLINE_BYTES else await asyncio.to_thread(_load_long, data)
