"""Real servers on real sockets: in a thread of the test process, or as the command itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import tiny_models
from layertap.server import flags
from layertap.server.app import build_app
from layertap.server.run import build_service

VOCAB = 320
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build_chat_model(folder: Path, **changes: Any) -> Path:
    """A tiny Llama with a byte-level tokenizer that writes BOS, and a chat template that does so itself."""
    # No token for padding: its states are zero, and a prompt of nothing else is refused with a 500.
    tiny_models.build("llama", folder, torch.float32, vocab_size=VOCAB, pad_token_id=None, **changes)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "the future of hidden states is the history of the model and the words in it"
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


class ThreadServer:
    """A server in a thread of this process, so that a test can look into its engine."""

    def __init__(self, *argv: str) -> None:
        args = flags.parse(argv)
        self.service = build_service(args)
        local = getattr(self.service.engine, "_engine", None)
        self.core = local and local.core  # None: it is in a process of its own
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = build_app(self.service, args.api_key)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5, timeout_keep_alive=75
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return httpx.post(self.url + path, timeout=120, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=120, **kwargs)

    def complete(self, prompt: Any = (5, 6, 7), **body: Any) -> dict[str, Any]:
        body = {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt, "max_tokens": 1, **body}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wait_idle(self, seconds: float = 30) -> None:
        """Until nothing is answered, runs, is stored, or is being cleaned up."""
        deadline = time.monotonic() + seconds
        answering = self.service.metrics.in_flight._value  # type: ignore[attr-defined]
        while answering.get() or self.core.requests or self.core._pinned or self.service._cleaning:
            assert time.monotonic() < deadline, (self.core.stats(), self.service._cleaning)
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_chat_model(tmp_path_factory.mktemp("chat_model")))


def tiny_flags(model: str, storage: Path | str, *more: str) -> list[str]:
    return [
        model, "--layers", "1,3,5", "--storage", str(storage), "--device", "cpu", "--max-model-len", "512",
        "--kv-cache-memory-bytes", "32MiB", *more,
    ]  # fmt: skip


@pytest.fixture
def start(chat_model: str, tmp_path: Path) -> Iterator[Callable[..., ThreadServer]]:
    """``start("--flag", ...)`` is a server over the tiny model; its records go to ``tmp_path / "states"``."""
    running: list[ThreadServer] = []

    def begin(*more: str, storage: Path | None = None, model: str = chat_model) -> ThreadServer:
        server = ThreadServer(*tiny_flags(model, storage or tmp_path / "states", *more))
        running.append(server)
        return server

    yield begin
    for server in running:
        server.close()


@pytest.fixture(scope="module")
def server(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    """One server for all tests of a module."""
    made = ThreadServer(*tiny_flags(chat_model, tmp_path_factory.mktemp("states")))
    yield made
    made.close()


class Command:
    """``layertap serve`` as a process of its own."""

    def __init__(self, log: Path, *argv: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "layertap.cli", "serve", *argv, "--host", "127.0.0.1", "--port", "0"],
                stderr=out,
                stdout=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.url = ""

    def wait_ready(self, seconds: float = 240) -> Command:
        deadline = time.monotonic() + seconds
        while True:
            for line in self.log.read_text().splitlines():
                if line.startswith("layertap: serving "):
                    self.url = line.split(" on ")[1].split(",")[0]
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            if self.url:  # what has been announced is there
                assert httpx.get(self.url + "/health").status_code == 200
                return self
            time.sleep(0.1)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **kwargs)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """``command(MODEL, "--flag", ...)`` runs ``layertap serve``; killed after the test if it still runs."""
    running: list[Command] = []

    def begin(*argv: str) -> Command:
        made = Command(tmp_path / f"serve{len(running)}.log", *argv)
        running.append(made)
        return made

    yield begin
    for made in running:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
