"""Many clients for a while: no error, no lost file, no growth."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from layertap.record import verify_record

from .conftest import ThreadServer

CLIENTS = 64
REQUESTS = 2000


@pytest.mark.slow
def test_2000_requests_from_64_clients(start: Any) -> None:
    server: ThreadServer = start("--max-num-seqs", "64")
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randrange(1, 60))] for _ in range(REQUESTS)]
    paths: dict[int, str] = {}
    wrong: list[str] = []
    process = psutil.Process()
    marks: list[tuple[int, int]] = []

    def mark(most: int = 0) -> None:
        server.wait_idle()
        gc.collect()
        deadline = (
            time.monotonic() + 15
        )  # the server closes its ends of the clients' connections a moment later
        while len(os.listdir("/proc/self/fd")) > most and time.monotonic() < deadline:
            time.sleep(0.1)
        marks.append((process.memory_info().rss, len(os.listdir("/proc/self/fd"))))

    async def client_of(session: httpx.AsyncClient, numbers: list[int]) -> None:
        for i in numbers:
            body = {"prompt": prompts[i], "max_tokens": 1 + i % 3, "return_token_ids": True}
            response = await session.post("/v1/completions", json=body, timeout=300)
            if response.status_code != 200:
                wrong.append(response.text)
                continue
            answer = response.json()
            if answer["choices"][0]["prompt_token_ids"] != prompts[i]:
                wrong.append(f"{i}: another prompt's answer")
            paths[i] = answer["kv_transfer_params"]["hidden_states_path"]

    async def run(first: int, last: int) -> None:
        limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as session:
            numbers = list(range(first, last))
            await asyncio.gather(*(client_of(session, numbers[c::CLIENTS]) for c in range(CLIENTS)))

    idle = len(os.listdir("/proc/self/fd"))
    asyncio.run(run(0, 200))
    mark(most=idle)
    asyncio.run(run(200, REQUESTS))
    mark(most=marks[0][1] + 4)
    assert wrong == []
    assert len(set(paths.values())) == REQUESTS
    for i, path in paths.items():
        assert verify_record(path).shape == (len(prompts[i]), 3, 64)
    folder = Path(server.service.storage.folder)  # type: ignore[union-attr]
    assert len(list(folder.glob("*.safetensors"))) == REQUESTS
    (memory, descriptors), (memory_after, descriptors_after) = marks
    assert memory_after - memory < 48 << 20
    assert descriptors_after <= descriptors + 4
    stats = server.core.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
