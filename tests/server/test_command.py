"""``layertap serve`` as a process: vLLM's command, its end on SIGTERM, and its start after SIGKILL."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from layertap import reader
from layertap.cli import main as cli_main

from .conftest import tiny_flags


def vllm_flags(storage: Path) -> list[str]:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 5]}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return ["--speculative_config", json.dumps(speculative), "--kv_transfer_config", json.dumps(transfer)]


def test_vllms_command_serves_and_ends_with_0_after_what_runs(
    command: Any, chat_model: str, tmp_path: Path
) -> None:
    storage = tmp_path / "states"
    started = command(chat_model, *vllm_flags(storage), "--max-num-seqs", "4").wait_ready()
    client = openai.OpenAI(base_url=f"{started.url}/v1", api_key="EMPTY")
    told = started.log.read_text()
    assert (
        "layertap: each request gets the states of all its prompt tokens at all these layers, in float32"
        in told
    )
    answer = client.completions.create(
        model=client.models.list().data[0].id, prompt="The future of AI is", max_tokens=1
    )
    path = answer.kv_transfer_params["hidden_states_path"]  # type: ignore[attr-defined]
    assert reader.open(path).layer_ids == (1, 3, 4, 5)

    results: list[httpx.Response] = []
    body = {"prompt": "of the", "max_tokens": 300, "ignore_eos": True}
    sending = threading.Thread(target=lambda: results.append(started.post("/v1/completions", body)))
    sending.start()
    metrics = started.url + "/metrics"
    deadline = time.monotonic() + 60
    while 'layertap_requests_running{replica="0"} 1.0' not in httpx.get(metrics).text:
        assert time.monotonic() < deadline
    assert started.stop() == 0, started.log.read_text()
    sending.join(60)
    assert results[0].status_code == 200
    assert results[0].json()["usage"]["completion_tokens"] == 300
    assert "Traceback" not in started.log.read_text()


def test_a_start_after_sigkill_removes_what_was_left_behind(
    command: Any, chat_model: str, tmp_path: Path
) -> None:
    storage = tmp_path / "states"
    started = command(*tiny_flags(chat_model, storage)).wait_ready()
    threads = [
        threading.Thread(target=_ignore_errors, args=(started, {"prompt": [5] * 400, "n": 8}))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    started.stop(signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    orphan = storage / f".layertap-{started.process.pid}-0123456789abcdef-7.tmp"
    orphan.write_bytes(b"half a record")
    again = command(*tiny_flags(chat_model, storage)).wait_ready()
    assert not list(storage.glob("*.tmp"))
    assert again.post("/v1/completions", {"prompt": [5]}).status_code == 200
    assert again.stop() == 0


def _ignore_errors(started: Any, body: dict[str, Any]) -> None:
    try:
        started.post("/v1/completions", body)
    except httpx.TransportError:
        return


def test_a_server_without_layers_says_so_and_how_to_have_them(command: Any, chat_model: str) -> None:
    started = command(chat_model, "--enforce-eager", "--kv-cache-memory-bytes", "16MiB").wait_ready()
    serving, told = (line for line in started.log.read_text().splitlines() if line.startswith("layertap: "))
    assert serving.startswith("layertap: serving ")
    assert told.startswith("layertap: requests get no hidden states: ")
    assert "--layers" in told
    answer = started.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["kv_transfer_params"] is None
    assert started.stop() == 0


def test_a_taken_port_and_wrong_flags_are_told_in_a_line(
    chat_model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli_main(["serve", chat_model, "--host", "127.0.0.1", "--port", port]) == 2
    assert port in capfd.readouterr().err
    assert cli_main(["serve", chat_model, "--max_model_lenght", "3"]) == 2
    message = capfd.readouterr().err
    assert "--max-model-len" in message
    assert len(message.splitlines()) == 1
