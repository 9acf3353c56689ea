"""Several engine processes behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import uvicorn

from layertap.errors import CorruptRecordError, InvalidInputError, LayertapError
from layertap.outputs import Logprob, RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.record import verify_record
from layertap.sampling_params import SamplingParams
from layertap.server import flags, wire
from layertap.server.app import build_app
from layertap.server.engine import AsyncEngine, EngineCall, EngineFacts, OutputStream
from layertap.server.replica import _watch
from layertap.server.replicas import ReplicaEngine, _environment
from layertap.server.run import _Server, build_service
from layertap.server.service import Service
from layertap.server.tokenizing import Tokenizing
from small_jobs import wait_until

from .conftest import VOCAB, Command, ThreadServer, tiny_flags


def engines(started: Command | None = None) -> list[psutil.Process]:
    """The engine processes of a server, or of this process."""
    found = []
    for child in psutil.Process(started and started.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie, by now
            if child.status() != psutil.STATUS_ZOMBIE and "layertap.server.replica" in child.cmdline():
                found.append(child)
    return found


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[None]:
    """The engine gets a process of its own, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("layertap.server.run.pick_device", lambda config: torch.device("cuda"))
        yield


@pytest.fixture(scope="module")
def replica(
    on_gpu: None, chat_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadServer]:
    """A server whose one engine is in a process of its own, with a connector that can go wrong."""
    made = ThreadServer(*odd_flags(chat_model, tmp_path_factory.mktemp("odd"), "OddConnector"))
    yield made
    made.close()


ODD_CONNECTORS = str(Path(__file__).with_name("odd_connectors.py"))


def odd_flags(model: str, storage: Path, connector: str, module: str = ODD_CONNECTORS) -> list[str]:
    """Flags for a connector of a module's."""
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    given = tiny_flags(model, storage, "--kv-transfer-config", json.dumps(transfer))
    at = given.index("--storage")
    return given[:at] + given[at + 2 :]


ODD = {
    name: {"kv_transfer_params": {"dtype": dtype}}
    for name, dtype in {"unchecked": "float32", "unpicklable": "float16", "unreadable": "bfloat16"}.items()
}
"""More fields of a request, and what becomes of it with ``OddConnector``."""


def events(streamed: httpx.Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in streamed.text.splitlines() if line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


class _StuckEngine(AsyncEngine):
    """Takes nothing, and answers nothing."""

    facts = EngineFacts("stuck", 512, VOCAB, 16, "float32", 4, None, None, "cpu")
    alive = ready = True  # type: ignore[assignment]

    async def start(self) -> None:
        pass

    async def submit(self, calls: Sequence[EngineCall]) -> list[OutputStream]:
        return [OutputStream(call) for call in calls]

    def abort(self, call: EngineCall) -> None:
        pass

    def stats(self) -> dict[str, dict[str, Any]]:
        return {}

    async def close(self) -> None:
        pass


def metric(started: Command | ThreadServer, name: str) -> dict[str, float]:
    lines = httpx.get(started.url + "/metrics").text.splitlines()
    return {
        line.split('replica="')[1][0]: float(line.split()[-1])
        for line in lines
        if line.startswith(f"layertap_{name}{{")
    }


@pytest.mark.slow
def test_metrics_are_there_from_the_start_and_move_under_load(replica: ThreadServer) -> None:
    deadline = time.monotonic() + 0.4  # before the second statistics
    while not metric(replica, "cache_blocks"):
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def load() -> None:
        while not stop.is_set():
            replica.complete(max_tokens=4)

    stop = threading.Event()
    thread = threading.Thread(target=load)
    thread.start()
    try:
        deadline = time.monotonic() + 5
        seen: set[float] = set()
        while len(seen - {0.0}) < 2:
            assert thread.is_alive()
            assert time.monotonic() < deadline, seen
            seen |= set(metric(replica, "steps_total").values())
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_check_that_fails_in_an_unforeseen_way_fails_its_request_alone(replica: ThreadServer) -> None:
    failed = replica.post("/v1/completions", {"prompt": [[5], [6]], **ODD["unchecked"]})
    assert failed.status_code == 500
    assert "TypeError: boom" in failed.json()["error"]["message"]
    replica.complete()
    assert metric(replica, "replica_restarts_total") == {"0": 0}


@pytest.mark.slow
def test_a_wrong_prompt_among_others_leaves_nothing_of_them(replica: ThreadServer) -> None:
    """None of them runs before all are checked."""
    storage = replica.service.storage
    assert storage is not None
    before = set(os.listdir(storage.folder))
    for _ in range(10):
        refused = replica.post("/v1/completions", {"prompt": [[7, 8, 9], [5], [999]], "max_tokens": 1})
        assert refused.status_code == 400
        assert "999" in refused.json()["error"]["message"]
    both = replica.post("/v1/completions", {"prompt": [[7, 8, 9], [5]], "max_tokens": 1}).json()
    for choice in both["choices"]:
        verify_record(choice["kv_transfer_params"]["hidden_states_path"])
    assert len(set(os.listdir(storage.folder)) - before) == 2


def test_replicas_share_the_cores_that_the_server_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert "OMP_NUM_THREADS" not in _environment(1)
    assert _environment(2)["OMP_NUM_THREADS"] == "3"
    assert _environment(8)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _environment(2)["OMP_NUM_THREADS"] == "5"


class _OwnError(InvalidInputError):
    def __init__(self, token: int) -> None:
        super().__init__("token", token, "another")


def test_an_error_arrives_or_a_plain_one_in_its_place() -> None:
    plain = InvalidInputError("prompt", [999], "token ids from 0 to 319")
    assert wire.sendable(plain) is plain
    for error in (_OwnError(3), CorruptRecordError("a.safetensors", "it is empty")):
        sent = pickle.loads(pickle.dumps(wire.sendable(error)))
        assert isinstance(sent, LayertapError)
        assert isinstance(sent, InvalidInputError) == isinstance(error, InvalidInputError)
        assert str(sent).replace("'", "") == str(error)


@pytest.mark.slow
def test_the_prompt_stays_in_the_server(replica: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[RequestOutput] = []
    take = ReplicaEngine._take

    def spy(process: Any, message: Any) -> None:
        if isinstance(message, wire.Output):
            received.append(message.output)
        take(process, message)

    monkeypatch.setattr(ReplicaEngine, "_take", staticmethod(spy))
    body = {"prompt": "of the future", "max_tokens": 2, "echo": True, "return_token_ids": True}
    for stream in (False, True):
        answer = replica.post("/v1/completions", {**body, "stream": stream})
        chunks = events(answer) if stream else [answer.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices).startswith("of the future")
        ids = replica.post("/tokenize", {"prompt": "of the future"}).json()["tokens"]
        assert next(c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")) == ids
    assert received
    assert not any(o.prompt or o.prompt_token_ids for o in received)


def test_the_event_loop_goes_on_while_a_long_message_is_read() -> None:
    rows = [{j: Logprob(-1.0 * j, j, "x") for j in range(20)} for _ in range(4000)]
    data = wire.pack(wire.Output(RequestOutput("a", None, [], [], True, prompt_logprobs=[None, *rows])))

    async def read() -> tuple[int, Any]:
        reader = asyncio.StreamReader(limit=1 << 30)
        reader.feed_data(data)
        reading = asyncio.create_task(wire.areceive(reader))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns, reading.result()

    turns, message = asyncio.run(read())
    assert turns > 8
    assert message.output.prompt_logprobs == [None, *rows]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_cannot_be_pickled_fails_its_request_alone(
    replica: ThreadServer, stream: bool
) -> None:
    for n in (1, 2):
        body = {"prompt": [5, 6], "n": n, "max_tokens": 3, "stream": stream, **ODD["unpicklable"]}
        failed = replica.post("/v1/completions", body)
        assert failed.status_code == (200 if stream else 500)
        error = next(e for e in events(failed) if "error" in e) if stream else failed.json()
        assert error["error"]["code"] == "engine"
        assert "cannot pickle" in error["error"]["message"]
    replica.complete()
    assert metric(replica, "replica_restarts_total") == {"0": 0}


@pytest.mark.slow
def test_an_output_that_cannot_be_read_costs_the_replica_and_not_the_server(replica: ThreadServer) -> None:
    before = metric(replica, "replica_restarts_total")["0"]
    failed = replica.post("/v1/completions", {"prompt": [5, 6], **ODD["unreadable"]})
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_died"
    deadline = time.monotonic() + 200
    while replica.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    replica.complete()
    assert metric(replica, "replica_restarts_total") == {"0": before + 1}


def test_the_end_does_not_wait_for_an_engine_that_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = Service(_StuckEngine(), Tokenizing(None, VOCAB), ["stuck"], None)
    monkeypatch.setattr("layertap.server.app._SETTLE_SECONDS", 0.2)

    async def end() -> None:
        app = build_app(stuck)
        async with app.router.lifespan_context(app):
            stuck.clean(OutputStream(EngineCall("a", TokenizedPrompt.of(None, [5]), SamplingParams())))

    asyncio.run(asyncio.wait_for(end(), 20))


@pytest.mark.slow
def test_an_unforeseen_error_at_the_start_is_told_in_a_line(
    on_gpu: None, chat_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LayertapError) as caught:
        build_service(flags.parse(odd_flags(chat_model, tmp_path, "NoMemoryConnector")))
    line = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB. (--verbose shows where)"
    assert str(caught.value) == line
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_replica_logs_at_the_servers_level(
    on_gpu: None, chat_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("layertap")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        service = build_service(flags.parse(tiny_flags(chat_model, tmp_path)))
    finally:
        logger.setLevel(before)
    service.engine.kill()  # type: ignore[attr-defined]
    assert "started in" in capfd.readouterr().err


def test_a_signal_at_the_start_ends_server_and_engine_at_once(
    on_gpu: None, chat_model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = engines()

    # Not before: a signal while the process is being made is noticed by the process itself, later.
    loading = threading.Event()

    def load_tokenizer(*args: object) -> None:
        loading.set()
        for _ in range(400):  # a signal that comes just before a sleep does not end that one
            time.sleep(0.1)

    def signal_when_started() -> None:
        assert loading.wait(30)
        wait_until(lambda: len(set(engines()) - set(others)) == 1)  # it has its own name a while later
        (new,) = set(engines()) - set(others)
        groups.append(os.getpgid(new.pid))
        os.kill(os.getpid(), signal.SIGTERM)

    groups: list[int] = []
    monkeypatch.setattr("layertap.engine.loader.load_tokenizer", load_tokenizer)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as in serve()
    thread = threading.Thread(target=signal_when_started)
    begun = time.monotonic()
    thread.start()
    try:
        with pytest.raises(SystemExit):
            build_service(flags.parse(tiny_flags(chat_model, tmp_path)))
        assert time.monotonic() - begun < 20
        assert not set(engines()) - set(others)
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join()
    assert groups != [os.getpgid(0)]  # the terminal's Ctrl-C reaches the server alone


def test_a_replica_that_loads_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    loaded = threading.Event()

    def end(status: int) -> None:
        ended.append(status)
        loaded.set()

    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = socket.socketpair()
    with theirs:
        thread = threading.Thread(target=_watch, args=(theirs, loaded))
        thread.start()
        time.sleep(0.5)
        assert not ended
        ours.close()
        thread.join(10)
    assert ended == [1]


@pytest.mark.slow
def test_a_replica_imports_what_the_server_does(
    on_gpu: None, chat_model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, shadow = tmp_path / "a script's", tmp_path / "shadow"
    script.mkdir()
    shadow.mkdir()
    (shadow / "xxhash.py").write_text("raise RuntimeError('the working directory comes first')")
    connector = "from layertap.connectors.file import FileConnector\nclass Mine(FileConnector): pass\n"
    (script / "connector_beside_a_script.py").write_text(connector)
    monkeypatch.syspath_prepend(script)
    monkeypatch.chdir(shadow)
    given = odd_flags(chat_model, tmp_path, "Mine", "connector_beside_a_script")
    service = build_service(flags.parse(given))
    service.engine.kill()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_end_does_not_wait_for_a_replica_that_is_being_restarted(on_gpu: None, start: Any) -> None:
    others = engines()
    server: ThreadServer = start()
    (first,) = set(engines()) - set(others)
    first.kill()
    deadline = time.monotonic() + 30
    while not (new := set(engines()) - {first, *others}):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 4
    while new & set(engines()):
        assert time.monotonic() - begun < 10
        time.sleep(0.02)


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_any_more_ends_the_server(
    on_gpu: None, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = engines()
    server: ThreadServer = start()
    engine = server.service.engine
    assert isinstance(engine, ReplicaEngine)
    (first,) = set(engines()) - set(others)
    monkeypatch.setattr("layertap.server.replicas._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("layertap.server.replicas._LONGEST_PAUSE", 0.02)
    broken = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr("layertap.server.replicas._command", lambda fd: broken)
    command = _Server(uvicorn.Config(None), engine, lambda: None)  # as the command line runs it
    assert not asyncio.run(command.on_tick(1))
    first.kill()
    deadline = time.monotonic() + 30
    while engine.alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert engine._failures[0] >= 6
    assert asyncio.run(command.on_tick(2))
    assert command.engine_died
    assert server.post("/v1/completions", {"prompt": [5, 6]}).status_code == 503


@pytest.mark.slow
def test_a_replica_that_dies_fails_its_own_requests_and_comes_back(
    command: Any, chat_model: str, tmp_path: Path
) -> None:
    storage = tmp_path / "states"
    started: Command = command(*tiny_flags(chat_model, storage, "--data-parallel-size", "2")).wait_ready()
    assert len(engines(started)) == 2

    wrong = started.post("/v1/completions", {"prompt": [[5], [999]]})
    assert wrong.status_code == 400
    assert "0 to 319" in wrong.json()["error"]["message"]

    # Several prompts of one call are spread over the engines.
    answer = started.post(
        "/v1/completions", {"prompt": [[5 + i, 6] for i in range(8)], "max_tokens": 2}
    ).json()
    for choice in answer["choices"]:
        verify_record(choice["kv_transfer_params"]["hidden_states_path"])
    deadline = time.monotonic() + 30
    while list(metric(started, "stored_requests_total").values()) != [4, 4]:
        assert time.monotonic() < deadline
        time.sleep(0.1)

    # Two long requests, one on each engine; one engine is killed under its request.
    results: dict[int, httpx.Response] = {}

    def ask(i: int) -> None:
        body = {"prompt": [5, 6, 7 + i], "max_tokens": 450, "ignore_eos": True}
        results[i] = started.post("/v1/completions", body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    while sum(metric(started, "requests_running").values()) < 2:
        assert all(t.is_alive() for t in threads)
        time.sleep(0.02)
    os.kill(engines(started)[0].pid, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert sorted(r.status_code for r in results.values()) == [200, 500]
    failed = next(r for r in results.values() if r.status_code == 500).json()["error"]
    assert failed["code"] == "engine_died"
    assert "send it again" in failed["message"]

    # The others never notice, and the dead one is replaced.
    assert started.post("/v1/completions", {"prompt": [5]}).status_code == 200
    deadline = time.monotonic() + 200
    while len(metric(started, "cache_blocks")) < 2:
        assert time.monotonic() < deadline, started.log.read_text()
        time.sleep(0.2)
    assert sum(metric(started, "replica_restarts_total").values()) == 1
    answers = [started.post("/v1/completions", {"prompt": [[5, i], [6, i]]}) for i in range(5, 10)]
    assert all(a.status_code == 200 for a in answers)
    assert not list(storage.glob("*.tmp"))

    pids = [e.pid for e in engines(started)]
    assert started.stop() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
