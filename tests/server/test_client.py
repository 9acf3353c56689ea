"""``layertap.Client`` and ``AsyncClient`` against our server."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap import AsyncClient, Client, ServerError
from layertap.errors import InvalidInputError

from .conftest import ThreadServer

PROMPTS: list[Any] = [[5, 6, 7], "the words", [8], [{"role": "user", "content": "hi"}], (9, 10)]


@pytest.mark.parametrize("transport", ["auto", "path", "http", "inline"])
def test_every_kind_of_handle_is_read_in_order(server: ThreadServer, transport: Any) -> None:
    folder = Path(server.service.storage.folder)  # type: ignore[union-attr]
    before = set(folder.glob("*.safetensors"))
    with Client(server.url, transport=transport, concurrency=4) as client:
        found = list(client.extract(PROMPTS, layers=[5, 1], tokens=slice(0, 2)))
    assert [f.token_ids.tolist() for f in found][0:3:2] == [[5, 6], [8]]
    assert all(f.layer_ids == (5, 1) for f in found)
    assert all(f.hidden_states.shape == (len(f), 2, 64) for f in found)
    assert set(folder.glob("*.safetensors")) == before


def test_transports_agree_and_keep_keeps(server: ThreadServer) -> None:
    with Client(server.url, keep=True, transport="http") as client:
        (a,) = client.extract([5, 6, 7])
        assert client.models()[0]["hidden_states"]["layers"] == [1, 3, 5]
    with Client(f"{server.url}/v1", transport="path") as client:
        (b,) = client.extract([5, 6, 7])
    assert torch.equal(a.hidden_states, b.hidden_states)
    assert server.get(f"/v1/hidden_states/{a.request_id}").status_code == 200


def test_an_endless_iterator_is_read_only_as_far_as_needed(server: ThreadServer) -> None:
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [5, 5 + taken % 100]

    with Client(server.url, concurrency=2) as client:
        found = client.extract(endless())
        for _ in range(10):
            next(found)
        found.close()  # type: ignore[attr-defined]
    assert taken <= 10 + 5


def test_errors_are_raised_or_returned(server: ThreadServer) -> None:
    with Client(server.url) as client:
        with pytest.raises(ServerError, match="0 to 319") as wrong:
            list(client.extract([[5], [999]]))
        assert wrong.value.status == 400
        good, bad = client.extract([[5], [999]], on_error="return")
        assert len(good) == 1
        assert isinstance(bad, ServerError)
    with pytest.raises(InvalidInputError, match="base_url"):
        Client("ftp://x")
    with Client("http://127.0.0.1:9", retries=1) as client, pytest.raises(ServerError, match="no answer"):
        list(client.extract([5]))


def test_the_asynchronous_client(server: ThreadServer) -> None:
    async def run() -> list[list[int]]:
        async def prompts() -> Any:
            for p in PROMPTS:
                yield p

        async with AsyncClient(server.url, concurrency=3) as client:
            assert await client.models()
            first = [s.token_ids.tolist() async for s in client.extract(prompts(), tokens="last")]
            second = [s.token_ids.tolist() async for s in client.extract(PROMPTS, tokens="last")]
            assert first == second
            with pytest.raises(ServerError):
                async for _ in client.extract([[999]]):
                    pass
            return first

    assert len(asyncio.run(run())) == len(PROMPTS)


class Flaky(http.server.BaseHTTPRequestHandler):
    """Fails twice, and then says that it will not do better."""

    answers: list[tuple[int, dict[str, str]]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, headers = self.answers.pop(0)
        body = json.dumps({"error": {"message": "later", "code": "x", "param": None}}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_what_may_succeed_later_is_tried_again_and_nothing_else() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as flaky:
        threading.Thread(target=flaky.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{flaky.server_address[1]}"
        Flaky.answers = [(503, {}), (507, {}), (400, {}), (200, {})]
        with Client(url) as client:
            with pytest.raises(ServerError) as wrong:
                list(client.extract([5]))
            assert wrong.value.status == 400
            assert len(Flaky.answers) == 1
            Flaky.answers = [(500, {"x-should-retry": "false"}), (200, {})]
            with pytest.raises(ServerError) as final:
                list(client.extract([5]))
            assert final.value.final
        flaky.shutdown()
