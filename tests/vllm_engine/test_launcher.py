"""From ``layertap serve``'s arguments to ``vllm serve``'s, and the check of HTTP requests. Without vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from layertap.errors import InvalidInputError
from layertap.vllm.launcher import SERVED_LAYERS_ENV, serve_command
from layertap.vllm.middleware import CheckTransferParams

SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [4, 1, 4, -1]}},
}
TRANSFER = {
    "kv_connector": "ExampleHiddenStatesConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"shared_storage_path": "/tmp/x", "num_writer_threads": 3},
}


def value(arguments: list[str], flag: str) -> Any:
    return json.loads(arguments[arguments.index(flag) + 1])


def test_vllms_documented_command_becomes_ours(tiny: Callable[..., str]) -> None:
    model = tiny("llama")
    command = serve_command([
        model,
        "--speculative_config", json.dumps(SPECULATIVE),
        f"--kv_transfer_config={json.dumps(TRANSFER)}",
        "--tensor_parallel_size", "2", "--enforce-eager",
    ])  # fmt: skip
    arguments = command.arguments
    assert arguments[:2] == ["serve", model]
    assert arguments[2:5] == ["--tensor_parallel_size", "2", "--enforce-eager"]
    ids = value(arguments, "--speculative-config")["draft_model_config"]["hf_config"]
    assert ids == {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}
    transfer = value(arguments, "--kv-transfer-config")
    assert transfer["kv_connector"] == "LayertapConnector"
    assert transfer["kv_connector_module_path"] == "layertap.vllm"
    assert transfer["kv_connector_extra_config"] == {
        "shared_storage_path": "/tmp/x",
        "num_writer_threads": 3,
        "layers": [4, 1, 4, 5],
    }
    assert json.loads(command.environment[SERVED_LAYERS_ENV]) == {"ids": [4, 1, 4, 5], "total": 5}


@pytest.mark.parametrize("place", ["first", "last", "flag"])
def test_the_model_may_stand_anywhere(tiny: Callable[..., str], place: str) -> None:
    model = tiny("llama")
    flags = ["--layers", "eagle3", "--output", "/tmp/y", "--port=1"]
    given = {"first": [model, *flags], "last": [*flags, model], "flag": [*flags, "--model", model]}[place]
    arguments = serve_command(given).arguments
    assert arguments[:3] == ["serve", model, "--port=1"]
    extra = value(arguments, "--kv-transfer-config")["kv_connector_extra_config"]
    assert extra == {"shared_storage_path": "/tmp/y", "layers": [2, 2, 2, 5]}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--layers"),
        (["--layers", "9"], "layers"),
        (["--layers", "norm"], "norm"),
        (["--layers"], "--layers"),
        (["--layers", "1", "--speculative-config", "{}"], "--layers"),
        (["--speculative-config", "{"], "JSON"),
        (["--speculative-config", '{"method": "eagle3"}'], "extract_hidden_states"),
        (["--layers", "1", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "kv_connector"),
        (["--layers", "1", "--kv-transfer-config", "[]"], "object"),
    ],
)
def test_wrong_arguments_are_named(tiny: Callable[..., str], flags: list[str], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        serve_command([tiny("llama"), *flags])


def test_a_model_is_needed() -> None:
    with pytest.raises(InvalidInputError, match="MODEL"):
        serve_command(["--layers", "1"])


def post(monkeypatch: pytest.MonkeyPatch, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    """Through the check; the app behind it answers 200 with the body it got."""
    monkeypatch.setenv(SERVED_LAYERS_ENV, json.dumps({"ids": [2, 5], "total": 5}))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got = b""
        more = True
        while more:
            message = await receive()
            got += message["body"]
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": got})

    parts = [body[:5], body[5:]]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path}
    asyncio.run(CheckTransferParams(app)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize(
    ("field", "request_body"),
    [
        ("kv_transfer_params.layers", {"kv_transfer_params": {"layers": [3]}}),
        ("kv_transfer_params.hidden_states_path", {"kv_transfer_params": {"hidden_states_path": "/etc/x"}}),
        ("kv_transfer_params.tokens", {"kv_transfer_params": {"tokens": "first"}}),
        ("stream", {"stream": True}),
        ("n", {"n": 4}),
        ("prompt", {"prompt": ["a", "b"]}),
    ],
)
def test_a_wrong_wish_is_answered_with_400(
    monkeypatch: pytest.MonkeyPatch, field: str, request_body: dict[str, Any]
) -> None:
    status, body = post(monkeypatch, json.dumps({"prompt": "x", **request_body}).encode())
    assert status == 400
    error = json.loads(body)["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(
            {"prompt": [1, 2, 3], "kv_transfer_params": {"layers": [5, 2, 5], "tokens": "last"}}
        ).encode(),
        b'{"not json',
        b"[1, 2, 3]",
    ],
)
def test_everything_else_reaches_vllm_as_it_is(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    assert post(monkeypatch, body) == (200, body)


def test_other_paths_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert post(monkeypatch, b'{"n": 4, "stream": true}', "/tokenize")[0] == 200
