"""Malformed requests get a 4xx that says what is wrong; the server serves on."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from .conftest import ThreadServer

COMPLETIONS = "/v1/completions"


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "prompt", "at least one"),
    ({"prompt": None}, "prompt", "text"),
    ({"prompt": {"a": 1}}, "prompt", "text"),
    ({"prompt": [5, -1]}, "[1]", "0 to 319"),
    ({"prompt": [5, 10**30]}, "[1]", "0 to 319"),
    ({"prompt": [5, 1.5]}, "[1]", "integer"),
    ({"prompt": [5, True]}, "[1]", "integer"),
    ({"prompt": [[5], [6, "x"]]}, "[1]", "integer"),
    ({"prompt": ["a", 5]}, "prompt[1]", "text"),
    ({"prompt": ["a"] * 5000}, "prompt", "4096"),
    ({"prompt": "a\ud800"}, "prompt", "Unicode"),
    ({"prompt": [5] * 513}, "prompt", "max_model_len"),
    ({"max_tokens": "1"}, "max_tokens", "integer"),
    ({"max_tokens": -1}, "max_tokens", "0"),
    ({"max_tokens": 10**9}, "max_tokens", "at most"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "0"),
    ({"top_p": 0}, "top_p", "0"),
    ({"n": 0}, "n", "1"),
    ({"n": 10**6}, "n", "128"),
    ({"logprobs": 1000}, "logprobs", "20"),
    ({"min_tokens": 5}, "min_tokens", "max_tokens"),
    ({"seed": 2**70}, "seed", "9223"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": ["x"] * 100}, "stop", "64"),
    ({"max_token": 5}, "max_token", "max_tokens"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "support"),
    ({"response_format": {"type": "json_object"}}, "response_format", "support"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1"),
    ({"kv_transfer_params": 5}, "kv_transfer_params", "dictionary"),
    ({"kv_transfer_params": {"layer": [1]}}, "kv_transfer_params.layer", "layers"),
    ({"kv_transfer_params": {"layers": [2]}}, "kv_transfer_params.layers", "1,3,5"),
    ({"kv_transfer_params": {"layers": [99]}}, "kv_transfer_params.layers", "5"),
    ({"kv_transfer_params": {"layers": "../x"}}, "kv_transfer_params.layers", ""),
    ({"kv_transfer_params": {"tokens": "first"}}, "kv_transfer_params.tokens", "last"),
    ({"kv_transfer_params": {"tokens": [99]}}, "kv_transfer_params.tokens", "2"),
    ({"kv_transfer_params": {"dtype": "int8"}}, "kv_transfer_params.dtype", "float16"),
    ({"kv_transfer_params": {"inline": "yes"}}, "kv_transfer_params.inline", "true"),
    ({"kv_transfer_params": {"inline": True}, "n": 2}, "kv_transfer_params.inline", "n"),
]


@pytest.mark.parametrize(("change", "param", "hint"), WRONG, ids=lambda v: json.dumps(v)[:50])
def test_wrong_values_are_named(server: ThreadServer, change: dict[str, Any], param: str, hint: str) -> None:
    body = {"prompt": [5, 6], "max_tokens": 1, **change}
    response = server.post(
        COMPLETIONS, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = error_of(response, 400)
    assert param in error["param"]
    assert hint in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_what_is_no_object_is_refused(server: ThreadServer, body: bytes) -> None:
    response = server.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    error_of(response, 400)


def test_a_million_token_ids_are_refused_and_others_served_meanwhile(server: ThreadServer) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": [5] * 10**6}), 400)
    assert "1000000 tokens" in error["message"]
    server.complete()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "a\x00b", "", "x" * 300, "-x", "a\nb", "\ud800"])
def test_request_ids_are_plain_names(server: ThreadServer, name: str) -> None:
    # cases.md 16
    body = json.dumps({"prompt": [5], "request_id": name})
    response = server.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "request_id"


def test_a_given_request_id_comes_back_and_names_no_file(server: ThreadServer) -> None:
    answer = server.complete(request_id="my-id")
    assert answer["id"] == "cmpl-my-id"
    assert "my-id" not in answer["kv_transfer_params"]["hidden_states_path"]


@pytest.mark.parametrize(
    "transfer", [{"hidden_states_path": "/etc/x"}, {"shared_storage_path": "/etc"}, {"path": "../x"}]
)
def test_no_client_chooses_a_path(server: ThreadServer, transfer: dict[str, Any]) -> None:
    # cases.md 16
    error = error_of(server.post(COMPLETIONS, {"prompt": [5], "kv_transfer_params": transfer}), 400)
    assert "only the fields" in error["message"]


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e%2fx", "x%00y", ".layertap", "states", "%ff"],
)
def test_records_are_reached_by_their_ids_only(server: ThreadServer, name: str) -> None:
    for method in ("GET", "DELETE"):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:  # no client tidies the path up
            raw.sendall(
                f"{method} /v1/hidden_states/{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            )
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.split()[1] in (b"404", b"405"), answer


def test_a_file_that_no_server_made_is_not_served(server: ThreadServer) -> None:
    storage = server.service.storage
    assert storage is not None
    other = Path(storage.folder) / "mine.safetensors"
    other.write_bytes(b"x")
    assert server.get("/v1/hidden_states/mine").status_code == 404
    assert other.exists()


def test_chat_messages_are_checked(server: ThreadServer) -> None:
    def refuse(param: str, **body: Any) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], **body}
        response = server.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
        error = error_of(response, 400)
        assert param in (error["param"] or ""), error
        message: str = error["message"]
        return message

    refuse("messages", messages=[])
    refuse("messages", messages=["x"])
    refuse("messages[0]", messages=[{"content": "x"}])
    refuse("messages[0].content", messages=[{"role": "user"}])
    image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    assert "text" in refuse("messages[0].content[0]", messages=[{"role": "user", "content": [image]}])
    refuse("messages[0].content", messages=[{"role": "user", "content": "\udfff"}])
    refuse("continue_final_message", continue_final_message=True)
    refuse("chat_template", chat_template="{{ x }}")
    refuse("chat_template_kwargs.chat_template", chat_template_kwargs={"chat_template": "{{ x }}"})
    refuse("top_logprobs", top_logprobs=3)
    refuse("top_logprobs", logprobs=True, top_logprobs=300)


JSON = {"content-type": "application/json"}


def test_other_methods_and_paths_are_told_so(server: ThreadServer) -> None:
    error_of(server.get("/v1/completions"), 405)
    error_of(server.get("/v1/nothing"), 404)


def test_large_bodies_get_413(start: Any) -> None:
    server = start("--max-body-bytes", "10000")
    error = error_of(server.post(COMPLETIONS, {"prompt": "x" * 20_000}), 413)
    assert "10000" in error["message"]

    def chunks() -> Any:
        for _ in range(20):
            yield b" " * 1000

    error_of(server.post(COMPLETIONS, content=chunks(), headers=JSON), 413)
    server.complete()


def test_a_key_is_asked_for(start: Any) -> None:
    server = start("--api-key", "secret", "--api-key", "other")
    assert error_of(server.get("/v1/models"), 401)["code"] == "invalid_api_key"
    for wrong in ("Bearer nope", "Bearer", "Basic secret", "secret", "Bearer secret2"):
        error_of(server.get("/v1/models", headers={"authorization": wrong}), 401)
        error_of(server.post("/tokenize", {"prompt": "x"}, headers={"authorization": wrong}), 401)
    for right in ("secret", "other"):
        assert server.get("/v1/models", headers={"authorization": f"Bearer {right}"}).status_code == 200
    assert server.get("/health").status_code == 200
    assert server.get("/metrics").status_code == 200
