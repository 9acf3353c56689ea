"""Clients that go away: queued, in prefill, in decode, while their states are written (cases.md 7)."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from layertap.record import verify_record

from .conftest import ThreadServer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_half_of_500_requests_cancelled_at_random_moments(start: Any) -> None:
    server: ThreadServer = start("--max-num-seqs", "16", "--max-num-batched-tokens", "256")
    folder = Path(server.service.storage.folder)  # type: ignore[union-attr]
    server.complete()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    server.wait_idle()
    before = descriptors()
    rng = random.Random(0)
    kept: list[str] = []
    wrong: list[str] = []
    cancelled = 0

    async def one(client: httpx.AsyncClient, i: int) -> None:
        nonlocal cancelled
        prompt = [rng.randrange(5, 300) for _ in range(rng.choice([3, 40, 400]))]
        body = {
            "prompt": prompt, "max_tokens": rng.choice([1, 1, 20]), "ignore_eos": True,
            "stream": rng.random() < 0.3, "n": rng.choice([1, 1, 2]),
        }  # fmt: skip
        send = client.post("/v1/completions", json=body, timeout=120)
        if i % 2:
            try:
                await asyncio.wait_for(send, rng.uniform(0, 1.5))
            except TimeoutError:
                cancelled += 1
                return
            return
        response = await send
        if response.status_code != 200:
            wrong.append(response.text)
        elif not body["stream"]:
            kept.extend(c["kv_transfer_params"]["hidden_states_path"] for c in response.json()["choices"])

    async def run() -> None:
        limits = httpx.Limits(max_connections=96)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(500)))

    asyncio.run(run())
    server.wait_idle()
    assert wrong == []
    assert cancelled > 50
    assert len(kept) > 100
    for path in kept:
        verify_record(path)
    stats = server.core.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_running"] == stats["num_waiting"] == stats["num_storing"] == 0
    assert stats["connector"]["staging_buffers_in_use"] == 0
    assert not list(folder.glob(".layertap-*.tmp"))
    deadline = time.monotonic() + 10
    while descriptors() > before + 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descriptors() <= before + 4
    server.complete()
    storage = server.service.storage
    assert storage is not None
    assert storage._under_way == set()
    asyncio.run(storage._scan())
    assert storage.used_bytes == sum(f.stat().st_size for f in folder.glob("*.safetensors"))


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_stays_of_a_client_that_went_away(start: Any, stream: bool) -> None:
    server: ThreadServer = start()
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
    with httpx.Client(base_url=server.url) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.3)
    server.wait_idle()
    stats = server.core.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_computed_tokens"] < 700
    assert list(Path(server.service.storage.folder).glob("*.safetensors")) == []  # type: ignore[union-attr]


def test_a_record_whose_client_went_away_just_before_the_answer_is_removed(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: ThreadServer = start()
    stored = asyncio.Event()
    from layertap.server.service import Flight

    original = Flight.finals

    async def slow(self: Flight) -> Any:
        outputs = await original(self)
        stored.set()
        await asyncio.sleep(30)  # the client leaves in this time
        return outputs

    monkeypatch.setattr(Flight, "finals", slow)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": [5], "max_tokens": 1}, timeout=2)
    server.wait_idle()
    assert stored.is_set()
    assert list(Path(server.service.storage.folder).glob("*.safetensors")) == []  # type: ignore[union-attr]
