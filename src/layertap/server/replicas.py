"""Several engine processes behind one face: dispatch by load, and restart of those that die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layertap.config import EngineConfig
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.errors import InvalidInputError, LayertapError
from layertap.server import wire
from layertap.server.engine import (
    ENGINE_DIED,
    AsyncEngine,
    EngineCall,
    EngineFacts,
    EngineUnavailableError,
    OutputStream,
)

logger = logging.getLogger("layertap")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_END_SECONDS = 15.0
_MOST_FAILURES = 6
"""Starts in a row that came to nothing, or to an engine that died at once: it is given up then. With the
pauses between them that takes half a minute and the starts' own time."""
_LONG_ENOUGH = 60.0  # seconds that an engine has lived, not to have died at once


@dataclass(slots=True, eq=False)
class _Flying:
    """A call on its way through a replica."""

    stream: OutputStream
    accepted: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Process:
    """A replica's process and this end of its socket."""

    index: int
    popen: subprocess.Popen[bytes]
    socket: socket.socket
    facts: EngineFacts
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    flying: dict[str, _Flying] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    load: int = 0
    """Tokens under way."""

    def send(self, message: object) -> None:
        assert self.writer is not None
        self.writer.write(wire.pack(message))

    def forget(self, call: EngineCall) -> None:
        if self.flying.pop(call.request_id, None) is not None:
            self.load -= call.num_tokens


class ReplicaEngine(AsyncEngine):
    """N engine processes. They start with it; :meth:`wait_ready` says how that went.

    Args:
        config: of each of them; on GPUs each gets one of its own.
        transfer: of each of them: they share the storage folder.
        count: how many.

    Raises:
        InvalidInputError: there are not so many GPUs.
    """

    def __init__(self, config: EngineConfig, transfer: KVTransferConfig | None, count: int) -> None:
        self._configs = [_config_of(config, i, count) for i in range(count)]
        self._transfer = transfer
        self._environment = _environment(count)
        self._starting: dict[int, subprocess.Popen[bytes]] = {}
        self._processes: list[_Process | None] = [None] * count
        self.restarts = [0] * count
        self._failures = [0] * count
        """Of each, how often in a row it could not be started, or died soon without having taken a call."""
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False
        self._spawned: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        try:
            for i in range(count):
                self._spawned.append(self._spawn(i))
        except BaseException:
            self.kill()
            raise

    def wait_ready(self) -> None:
        """Wait until every process has loaded its model. Then there are ``facts``.

        Raises:
            LayertapError: one of them cannot start. It has said why: the configuration is wrong, say.
        """
        for i, spawned in enumerate(self._spawned):
            process = self._processes[i] = self._ready(i, *spawned)
            self.facts = process.facts

    def kill(self) -> None:
        """End every process at once, and see it gone."""
        self._kill_starting()
        running = [p.popen for p in self._processes if p is not None]
        for popen in running:
            popen.kill()
        for popen in (*running, *self._starting.values()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(_END_SECONDS)

    def _kill_starting(self) -> None:
        self._closing = True
        for popen in list(self._starting.values()):
            popen.kill()

    def _spawn(self, index: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = subprocess.Popen(
                _command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=self._environment,
                start_new_session=True,  # the terminal's Ctrl-C is the server's affair
            )
        self._starting[index] = popen
        if self._closing:  # since the restart began
            popen.kill()
        begin = wire.Begin(self._configs[index], self._transfer, logger.getEffectiveLevel())
        with contextlib.suppress(BrokenPipeError):  # it has ended: _ready() tells
            ours.sendall(wire.pack(begin))
        return popen, ours

    def _ready(self, index: int, popen: subprocess.Popen[bytes], sock: socket.socket) -> _Process:
        """Wait for what a process says first."""
        message = wire.receive(sock)
        if isinstance(message, wire.Refused):
            popen.wait()
            raise message.error
        if not isinstance(message, wire.Ready):
            raise EngineUnavailableError(
                f"engine process {index} ended with status {popen.wait()} before it was ready"
            )
        del self._starting[index]
        return _Process(index, popen, sock, message.facts)

    async def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(i)) for i in range(len(self._configs))]
        while not all(p is not None and p.writer is not None for p in self._processes):
            await asyncio.sleep(0.005)

    async def _keep(self, index: int) -> None:
        """Read from a replica as long as it lives; then start the next one."""
        while True:
            process = self._processes[index]
            if process is None:
                await asyncio.sleep(min(_FIRST_PAUSE * 2 ** self._failures[index], _LONGEST_PAUSE))
                process = await self._restart(index)
                if process is None:
                    self._failures[index] += 1
                    continue
            process.reader, process.writer = await asyncio.open_connection(sock=process.socket)
            self._processes[index] = process
            begun = time.monotonic()
            self._failures[index] += 1
            if await self._read(process) or time.monotonic() - begun >= _LONG_ENOUGH:
                self._failures[index] = 0
            self._processes[index] = None
            process.writer.close()
            status = await asyncio.to_thread(process.popen.wait)
            if self._closing:
                return
            logger.error("engine process %d died (exit status %d): a new one is started", index, status)
            for flying in list(process.flying.values()):
                reason = (
                    f"engine process {index} died (exit status {status}); nothing was stored: send it again"
                )
                flying.stream.fail(reason, ENGINE_DIED)
                if not flying.accepted.done():
                    flying.accepted.set_exception(EngineUnavailableError(reason))

    async def _read(self, process: _Process) -> bool:
        """Take what a replica sends until it is gone; one that sends what cannot be read is ended.

        Returns:
            Whether it took any call.
        """
        assert process.reader is not None
        useful = False
        try:
            while (message := await wire.areceive(process.reader)) is not None:
                useful = useful or not isinstance(message, wire.Stats)
                self._take(process, message)
        except Exception:
            logger.exception("engine process %d sent what cannot be read: it is ended", process.index)
            process.popen.kill()
        return useful

    async def _restart(self, index: int) -> _Process | None:
        try:
            popen, sock = await asyncio.to_thread(self._spawn, index)
            try:
                process = await asyncio.to_thread(self._ready, index, popen, sock)
            except BaseException:
                popen.kill()
                raise
        except (LayertapError, OSError) as error:
            logger.error("engine process %d could not be restarted: %s", index, error)
            return None
        self.restarts[index] += 1
        return process

    @staticmethod
    def _take(process: _Process, message: Any) -> None:
        if isinstance(message, wire.Stats):
            process.stats = message.values
        elif isinstance(message, wire.Output):
            flying = process.flying.get(message.output.request_id)
            if flying is not None:
                prompt = flying.stream.call.prompt
                output = replace(message.output, prompt=prompt.text, prompt_token_ids=prompt.token_ids)
                flying.stream.put(output)
                if output.finished:
                    process.forget(flying.stream.call)
        elif isinstance(message, wire.Accepted):
            flying = process.flying.get(message.call_id)
            if flying is not None and not flying.accepted.done():
                flying.accepted.set_result(None)
        else:
            assert isinstance(message, wire.Refused)
            assert message.call_id is not None
            flying = process.flying.get(message.call_id)
            if flying is not None:
                process.forget(flying.stream.call)
                if not flying.accepted.done():
                    flying.accepted.set_exception(message.error)

    async def submit(self, calls: Sequence[EngineCall]) -> list[OutputStream]:
        # Of several none may run before all are checked: what one has stored would be nobody's if another is
        # refused.
        hold = len(calls) > 1
        submitted: list[tuple[_Process, _Flying]] = []
        try:
            for call in calls:
                process = self._least_loaded()
                flying = _Flying(OutputStream(call), asyncio.get_running_loop().create_future())
                process.flying[call.request_id] = flying
                process.load += call.num_tokens
                process.send(wire.Submit(call, hold))
                submitted.append((process, flying))
            results = await asyncio.gather(*(f.accepted for _, f in submitted), return_exceptions=True)
            wrong = next((r for r in results if isinstance(r, BaseException)), None)
            if wrong is not None:
                raise wrong
        except BaseException:
            for process, flying in submitted:
                self.abort(flying.stream.call)
                if hold:
                    process.forget(flying.stream.call)  # it never ran: nothing more is heard of it
            raise
        if hold:
            for process, flying in submitted:
                process.send(wire.Run(flying.stream.call.request_id))
        return [f.stream for _, f in submitted]

    def _least_loaded(self) -> _Process:
        alive = [p for p in self._processes if p is not None and p.writer is not None]
        if not alive:
            raise EngineUnavailableError("no engine process is running; they are being restarted")
        return min(alive, key=lambda p: p.load)

    def abort(self, call: EngineCall) -> None:
        for process in self._processes:
            if process is not None and call.request_id in process.flying:
                process.send(wire.Abort(call))

    def stats(self) -> dict[str, dict[str, Any]]:
        result = {}
        for i, process in enumerate(self._processes):
            values = dict(process.stats) if process is not None else {}
            result[str(i)] = {**values, "restarts": self.restarts[i], "up": process is not None}
        return result

    @property
    def alive(self) -> bool:
        """False once no engine can be started any more: its GPU is broken, say, and whoever started the
        server is to know."""
        return self.ready or min(self._failures) < _MOST_FAILURES

    @property
    def ready(self) -> bool:
        return any(p is not None and p.writer is not None for p in self._processes)

    async def close(self) -> None:
        self._kill_starting()
        ending = [p for p in self._processes if p is not None]
        for process in ending:
            if process.writer is not None:
                process.writer.close()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for process in ending:
            try:
                await asyncio.to_thread(process.popen.wait, _END_SECONDS)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                await asyncio.to_thread(process.popen.wait)
            for flying in process.flying.values():
                flying.stream.fail("the server is shutting down", "aborted")


def _command(fd: int) -> list[str]:
    """Python that imports what this process does.

    ``-m`` would put the working directory first and leave a script's folder out; ``PYTHONPATH`` is not read
    in isolated mode, and would reach whatever the replica starts itself.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others too
    code = f"import sys; sys.path[:] = {path!a}; from layertap.server.replica import main; sys.exit(main())"
    modes = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    given = [mode for mode, on in modes.items() if on]
    return [sys.executable, *given, "-c", code, "layertap.server.replica", str(fd)]


def _config_of(config: EngineConfig, index: int, count: int) -> EngineConfig:
    import torch

    device = config.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if gpus < count:
            raise InvalidInputError("--data-parallel-size", count, f"at most {gpus}, the number of GPUs")
        device = f"cuda:{index}"
    seed = config.seed
    return replace(config, data_parallel_size=1, device=device, seed=seed)


def _environment(count: int) -> dict[str, str]:
    """Processes that share a CPU each get their part of the cores that this one may use."""
    if count == 1:
        return dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // count)), **os.environ}
