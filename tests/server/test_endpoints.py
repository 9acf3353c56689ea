"""Endpoints beside completions and chat."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import ThreadServer


def test_tokenize_and_detokenize_agree(server: ThreadServer) -> None:
    answer = server.post("/tokenize", {"prompt": "the words", "return_token_strs": True}).json()
    ids = answer["tokens"]
    assert ids[0] == 1
    assert answer["count"] == len(ids) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert (
        server.post("/tokenize", {"prompt": "the words", "add_special_tokens": False}).json()["tokens"]
        == ids[1:]
    )
    assert server.post("/detokenize", {"tokens": ids[1:]}).json() == {"prompt": "the words"}
    assert server.post("/detokenize", {"tokens": [10**20]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_tokenize_renders_chat_messages(server: ThreadServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<s>[user] hi</s>[assistant]"


def test_render_gives_what_chat_would_run(server: ThreadServer, chat_model: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}]}
    rendered = server.post("/v1/chat/completions/render", body).json()
    ran = server.post("/v1/chat/completions", {**body, "max_tokens": 1, "return_token_ids": True}).json()
    assert rendered["token_ids"] == ran["prompt_token_ids"]
    assert rendered["model"] == chat_model
    assert rendered["sampling_params"]["max_tokens"] == 512 - len(rendered["token_ids"])
    without = server.post("/v1/chat/completions/render", {**body, "add_generation_prompt": False}).json()
    assert rendered["token_ids"][: len(without["token_ids"])] == without["token_ids"]
    assert len(without["token_ids"]) < len(rendered["token_ids"])


@pytest.mark.parametrize(("side", "part"), [("right", slice(0, 4)), ("left", slice(-4, None))])
def test_render_truncates_on_either_side(server: ThreadServer, side: str, part: slice) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}]}
    full = server.post("/v1/chat/completions/render", body).json()["token_ids"]
    cut = server.post(
        "/v1/chat/completions/render", {**body, "truncate_prompt_tokens": 4, "truncation_side": side}
    ).json()["token_ids"]
    assert cut == full[part]


def test_tool_calls_reach_the_template_as_objects(server: ThreadServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert server.post("/v1/chat/completions/render", {"messages": messages}).status_code == 200
    call["function"]["arguments"] = "{"  # type: ignore[index]
    assert server.post("/v1/chat/completions/render", {"messages": messages}).status_code == 400


def test_health_version_and_models(server: ThreadServer, chat_model: str) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/version").json()["version"]
    card = server.get("/v1/models").json()["data"][0]
    assert card["max_model_len"] == 512
    assert card["hidden_states"] == {
        "layers": [1, 3, 5], "num_hidden_layers": 5, "hidden_size": 64, "dtype": "float32",
    }  # fmt: skip


def test_metrics_count_requests_tokens_bytes_and_failures(start: Any) -> None:
    server = start()

    def values() -> dict[str, float]:
        lines = server.get("/metrics").text.splitlines()
        return {
            k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        }

    before = values()
    prompt = list(range(5, 45))
    server.complete(prompt)
    server.complete(prompt)
    after = values()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grew('layertap_requests_total{finish_reason="length"}') == 2
    assert grew("layertap_prompt_tokens_total") == 80
    assert grew("layertap_generation_tokens_total") == 2
    assert grew('layertap_stored_bytes_total{replica="0"}') == 2 * 40 * 3 * 64 * 4
    assert grew('layertap_prefix_cache_hits_tokens_total{replica="0"}') == 32
    assert after['layertap_prefix_cache_hit_rate{replica="0"}'] == pytest.approx(0.4)
    assert grew("layertap_time_to_first_token_seconds_count") == 2
    assert grew("layertap_time_to_file_seconds_count") == 2
    assert grew('layertap_http_requests_total{method="POST",route="/v1/completions",status="200"}') == 2
    for gauge in ("requests_waiting", "requests_running", "cache_usage", "staging_buffers_in_use"):
        assert after[f'layertap_{gauge}{{replica="0"}}'] == 0
    assert "layertap_storage_bytes" in after
    server.post("/v1/completions", {"prompt": [5], "kv_transfer_params": {"dtype": "int"}})
    assert values()['layertap_http_requests_total{method="POST",route="/v1/completions",status="400"}'] == 1


def test_the_openapi_document_is_served(server: ThreadServer) -> None:
    document = server.get("/openapi.json").json()
    assert "/v1/completions" in document["paths"]
    assert server.get("/docs").status_code == 200
