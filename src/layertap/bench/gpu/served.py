"""``layertap serve`` in a process of its own, and this one as 64 clients, each with a connection that stays.

Request bodies are encoded before the clock starts: in use, that is the work of 64 other machines.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from layertap.bench.gpu.engine import CLIENTS, MEMORY_SHARE, Start, Task
from layertap.bench.gpu.ways import Measured, Way, until_complete

_TIMEOUT = 600.0


def server_command(start: Start) -> list[str]:
    """How the server is started, with the settings of :func:`layertap.bench.gpu.ways.engine_options`."""
    engine = start.engine
    assert engine.layers is not None
    values = {
        "--layers": ",".join(map(str, engine.layers)),
        "--storage": start.folder,
        "--host": "127.0.0.1",
        "--port": "0",
        "--load-format": "dummy",
        "--dtype": engine.dtype,
        "--max-model-len": start.max_model_len,
        "--max-num-batched-tokens": engine.token_budget,
        "--max-num-seqs": engine.max_num_seqs,
        "--gpu-memory-utilization": MEMORY_SHARE,
        "--device": start.device,
        "--uvicorn-log-level": "warning",
    }
    flags = [word for name, value in values.items() for word in (name, str(value))]
    flags += ["--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    flags += ["--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching"]
    return [sys.executable, "-m", "layertap.commands.serve", start.model_path, *flags]


def served(start: Start) -> Way:
    """The server and its clients.

    Raises:
        RuntimeError: the server has ended before it listened; what it said is in the log.
    """
    server = subprocess.Popen(
        server_command(start), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    address = _address(server)
    _wait_until_healthy(server, address)
    local = threading.local()

    def send(body: bytes) -> str:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT)
        headers = {"content-type": "application/json"}
        local.connection.request("POST", "/v1/completions", body, headers)
        response = local.connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {content[:500]!r}")
        return str(json.loads(content)["kv_transfer_params"]["hidden_states_path"])

    clients = ThreadPoolExecutor(CLIENTS)

    def run(task: Task) -> Measured:
        prompts = task.token_ids(start.vocab_size)
        bodies = [_body(prompt, task.max_tokens) for prompt in prompts]
        begun = time.monotonic()
        paths = list(clients.map(send, bodies))
        return until_complete(start, prompts, paths, begun)

    def close() -> None:
        clients.shutdown()
        server.terminate()
        server.wait()

    return Way(run, close=close)


def _body(prompt: Sequence[int], max_tokens: int) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()


def _address(server: subprocess.Popen[str]) -> tuple[str, int]:
    """Wait for the server to say where it listens; what it says goes on to our standard error."""
    assert server.stderr is not None
    stderr = server.stderr
    for line in stderr:
        sys.stderr.write(line)
        found = re.search(r"serving .* on (http://\S+?)(?:,|$)", line.strip())
        if found:
            threading.Thread(target=lambda: [sys.stderr.write(more) for more in stderr], daemon=True).start()
            parts = urlsplit(found[1])
            assert parts.hostname is not None
            assert parts.port is not None
            return parts.hostname, parts.port
    raise RuntimeError(f"the server ended with status {server.wait()} before it listened")


def _wait_until_healthy(server: subprocess.Popen[str], address: tuple[str, int]) -> None:
    """Return when the server answers; it says where it will listen a moment before it does."""
    while server.poll() is None:
        connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except ConnectionRefusedError:
            pass
        finally:
            connection.close()
        time.sleep(0.02)
    raise RuntimeError(f"the server ended with status {server.wait()} before it answered")
