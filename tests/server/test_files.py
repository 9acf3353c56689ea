"""The life of stored records: fetched, deleted, aged out, refused for want of room, answered inline."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from layertap import reader
from layertap.record import verify_record
from layertap.selection import FIELDS
from layertap.server.http_errors import ApiError
from layertap.server.run import what_requests_get
from layertap.server.storage import Storage

from .conftest import ThreadServer

ROW = 3 * 64 * 4


def handle_of(answer: dict[str, Any]) -> tuple[Path, str]:
    params = answer["kv_transfer_params"]
    return Path(params["hidden_states_path"]), params["hidden_states_id"]


def test_a_record_is_fetched_and_deleted_over_http(server: ThreadServer) -> None:
    path, record_id = handle_of(server.complete())
    response = server.get(f"/v1/hidden_states/{record_id}")
    assert response.content == path.read_bytes()
    assert int(response.headers["content-length"]) == path.stat().st_size
    answer = httpx.delete(f"{server.url}/v1/hidden_states/{record_id}")
    assert answer.json() == {"id": record_id, "object": "hidden_states.deleted", "deleted": True}
    assert not path.exists()
    assert httpx.delete(f"{server.url}/v1/hidden_states/{record_id}").status_code == 404
    assert server.get(f"/v1/hidden_states/{record_id}").status_code == 404


def test_what_the_start_tells_of_requests_is_what_they_get(server: ThreadServer) -> None:
    told = what_requests_get(server.service)
    path, _ = handle_of(server.complete([5, 6, 7], max_tokens=3))
    record = reader.open(path)
    assert record.layer_ids == server.service.facts.layers.ids  # type: ignore[union-attr]
    assert record.token_ids.tolist() == [5, 6, 7]  # the prompt's, and no generated ones
    assert record.hidden_states.dtype == getattr(torch, told.partition("; ")[0].split()[-1])
    assert told.endswith(f"kv_transfer_params choose otherwise ({', '.join([*FIELDS, 'inline'])})")
    chosen = {
        "layers": [3],
        "tokens": [0],
        "include_output_tokens": True,
        "dtype": "bfloat16",
        "inline": True,
    }
    inline = server.complete(kv_transfer_params=chosen)["kv_transfer_params"]
    assert "hidden_states" in inline


def test_no_lock_is_needed_to_read_a_file(server: ThreadServer) -> None:
    # cases.md 20: complete under its final name before the answer is sent, and nothing beside it.
    path, _ = handle_of(server.complete())
    verify_record(path)
    assert not Path(f"{path}.lock").exists()


def test_inline_answers_carry_the_record_and_leave_no_file(server: ThreadServer) -> None:
    path, _ = handle_of(server.complete())
    before = set(path.parent.iterdir())
    params = server.complete(kv_transfer_params={"inline": True})["kv_transfer_params"]
    assert params["hidden_states_format"] == "safetensors"
    tensors = safetensors.torch.load(base64.b64decode(params["hidden_states"]))
    stored = reader.open(path)
    assert tensors["token_ids"].tolist() == [5, 6, 7]
    assert tensors["hidden_states"].equal(stored.hidden_states)
    assert set(path.parent.iterdir()) == before


def test_inline_answers_have_a_limit(start: Any) -> None:
    server = start("--max-inline-bytes", "20000")
    server.complete([5] * 10, kv_transfer_params={"inline": True})
    body = {"prompt": [5] * 100, "kv_transfer_params": {"inline": True}}
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400
    assert "--max-inline-bytes" in refused.json()["error"]["message"]
    server.complete([5] * 100, kv_transfer_params={"inline": True, "tokens": "last"})
    assert list((Path(server.service.storage.folder)).glob("*.safetensors")) == []


def test_unread_records_age_out_and_other_files_stay(start: Any) -> None:
    server = start("--ttl-seconds", "1.5")
    folder = Path(server.service.storage.folder)
    other = folder / "mine.safetensors"
    other.write_bytes(b"x")
    os.utime(other, (1, 1))
    old, _ = handle_of(server.complete())
    deadline = time.monotonic() + 20
    while old.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert other.exists()
    fresh, _ = handle_of(server.complete())
    assert fresh.exists()
    assert "layertap_storage_expired_total 1.0" in server.get("/metrics").text


def test_max_bytes_refuses_with_507_until_there_is_room(start: Any) -> None:
    server = start("--max-bytes", "100000")
    folder = Path(server.service.storage.folder)
    paths = []
    while True:
        response = server.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
        if response.status_code != 200:
            break
        paths.append(handle_of(response.json())[0])
        assert sum(f.stat().st_size for f in folder.glob("*.safetensors")) <= 100_000
    assert response.status_code == 507
    error = response.json()["error"]
    assert error["type"] == "insufficient_storage_error"
    assert error["code"] == "storage_full"
    assert "100000" in error["message"]
    assert len(paths) == 3
    paths[0].unlink()  # a reader that has taken its file
    time.sleep(0.25)
    assert server.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1}).status_code == 200
    assert server.core.pool.num_free == server.core.pool.num_blocks


@pytest.mark.parametrize("limit", [[], ["--max-bytes", "100000"]], ids=["no limit", "limit"])
def test_records_that_were_answered_inline_make_no_room_for_others(start: Any, limit: list[str]) -> None:
    server = start(*limit)
    folder = Path(server.service.storage.folder)
    for _ in range(8):
        server.complete([5] * 40, kv_transfer_params={"inline": True})
    assert server.service.storage.used_bytes == 0
    for _ in range(8):
        server.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
    stored = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert server.service.storage.used_bytes == stored
    assert not limit or 60_000 < stored <= 100_000


def record_of(number: int) -> str:
    return f"cmpl-{number:032x}-0"


class Folder:
    """A storage of 100 bytes, and records that appear in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = Storage(str(path), max_bytes=100)

    def write(self, number: int, size: int) -> None:
        (self.path / f"{record_of(number)}.safetensors").write_bytes(b"x" * size)

    async def refuses(self, size: int) -> bool:
        try:
            await self.storage.reserve(size)
        except ApiError:
            return True
        self.storage.release(size)
        return False


@pytest.mark.parametrize("released", ["before the scan", "during the scan", "after the scan"])
def test_a_record_counts_once_whenever_it_is_looked_at(tmp_path: Path, released: str) -> None:
    """What a scan sees of requests under way is their reservation's."""

    async def main() -> None:
        folder = Folder(tmp_path)
        storage = folder.storage
        await storage.reserve(40, [record_of(0)])
        folder.write(0, 40)
        if released == "before the scan":
            storage.release(40, [record_of(0)])
        scan = asyncio.create_task(storage._scan())
        await asyncio.sleep(0)  # the scan has begun
        if released == "during the scan":
            storage.release(40, [record_of(0)])
        await scan
        assert not await folder.refuses(60)
        if released == "after the scan":
            storage.release(40, [record_of(0)])
        assert storage.used_bytes == 40
        assert not await folder.refuses(60)
        assert await folder.refuses(61)

    asyncio.run(main())


def test_a_record_that_appears_during_a_scan_counts_once(tmp_path: Path) -> None:
    async def main() -> None:
        folder = Folder(tmp_path)
        look = folder.storage._look

        def slow(left_out: set[str]) -> int:
            running.wait(5)
            return look(left_out)

        folder.storage._look = slow  # type: ignore[method-assign]
        running = threading.Event()
        scan = asyncio.create_task(folder.storage._scan())
        await asyncio.sleep(0)
        await folder.storage.reserve(40, [record_of(0)])
        folder.write(0, 40)
        folder.storage.release(40, [record_of(0)])
        running.set()
        await scan
        assert folder.storage.used_bytes == 40

    asyncio.run(main())


def test_a_record_removed_under_way_was_never_counted(tmp_path: Path) -> None:
    """Of a request that was cancelled, or answered inline."""

    async def main() -> None:
        folder = Folder(tmp_path)
        await folder.storage.reserve(40, [record_of(0)])
        folder.write(0, 40)
        assert folder.storage.delete(record_of(0))
        folder.storage.release(40, [record_of(0)])
        assert folder.storage.used_bytes == 0

    asyncio.run(main())


def test_a_record_deleted_during_a_scan_makes_room_once(tmp_path: Path) -> None:
    async def main() -> None:
        folder = Folder(tmp_path)
        for number in range(2):
            await folder.storage.reserve(40, [record_of(number)])
            folder.write(number, 40)
            folder.storage.release(40, [record_of(number)])
        scan = asyncio.create_task(folder.storage._scan())
        await asyncio.sleep(0)
        folder.storage.delete(record_of(0))
        await scan
        assert await folder.refuses(61)
        assert not await folder.refuses(60)
        assert folder.storage.used_bytes == 40

    asyncio.run(main())


def test_a_reservation_of_a_failed_request_is_given_back(start: Any) -> None:
    server = start("--max-bytes", "60000")
    for _ in range(5):
        body = {"prompt": [5] * 40, "max_tokens": 1, "kv_transfer_params": {"tokens": [99]}}
        assert server.post("/v1/completions", body).status_code == 400
    server.complete([5] * 40)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "layertap-test", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_file_system_fails_requests_with_507_and_recovers(start: Any, tmpfs: Path) -> None:
    # cases.md 8
    server = start(storage=tmpfs)
    transfer = {"layers": [1, 3, 5] * 20}
    body = {"prompt": [5, 6] * 250, "max_tokens": 1, "kv_transfer_params": transfer}
    paths = []
    for _ in range(40):
        response = server.post("/v1/completions", body)
        if response.status_code != 200:
            break
        paths.append(handle_of(response.json())[0])
    assert response.status_code == 507
    assert response.json()["error"]["code"] == "storage_full"
    assert response.json()["error"]["type"] == "insufficient_storage_error"
    left = [p for p in tmpfs.iterdir() if p.suffix != ".lock"]
    assert sorted(left) == sorted(paths)  # nothing torn, nothing temporary
    for path in paths:
        verify_record(path)
    for path in paths[:3]:
        path.unlink()
    assert server.post("/v1/completions", body).status_code == 200
    server.wait_idle()
    assert server.core.pool.num_free == server.core.pool.num_blocks
