"""The same kind of prompts through ``LLM.generate`` and through the server with 32 clients, in turns.

    python benchmarks/serve_throughput.py [MODEL] [NUM_PROMPTS]

The prompts are random token ids of 16 to 512 tokens; each run uses fresh ones, so that the prefix cache
helps neither side. Records go to a folder on the same disk and are removed after each round. Both sides
run one OpenMP thread unless ``OMP_NUM_THREADS`` says otherwise: two processes whose threads spin at barriers
would slow each other down, and that is not what is measured.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CLIENTS = 32
LAYERS = [3, 15, 27, 30]
ROUNDS = 3


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 40000) for _ in range(rng.randrange(16, 513))] for _ in range(count)]


def clear(folder: str) -> None:
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()


def in_process(model: str, count: int, folder: str) -> None:
    """Child: one round for each line on standard input, its tokens a second on standard output."""
    from layertap import LLM, SamplingParams

    config = {"kv_connector": "FileConnector", "kv_connector_extra_config": {"shared_storage_path": folder}}
    with LLM(model, layers=LAYERS, kv_transfer_config=config) as llm:
        for line in sys.stdin:
            batch = prompts(count, int(line))
            begin = time.perf_counter()
            llm.generate(batch, SamplingParams(max_tokens=1, temperature=0))
            print(sum(map(len, batch)) / (time.perf_counter() - begin), flush=True)
            clear(folder)


def over_http(url: str, batch: list[list[int]]) -> float:
    import http.client

    local = threading.local()

    def send(prompt: list[int]) -> None:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0})
        local.connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = local.connection.getresponse()
        assert response.status == 200, response.read()
        assert json.loads(response.read())["kv_transfer_params"]["hidden_states_path"]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        begin = time.perf_counter()
        list(pool.map(send, batch))
        return sum(map(len, batch)) / (time.perf_counter() - begin)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        in_process(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 128
    folder = tempfile.mkdtemp(prefix="layertap-serve-bench-")
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", model, str(count), folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "layertap.commands.serve", model, "--layers", ",".join(map(str, LAYERS)),
         "--storage", folder, "--host", "127.0.0.1", "--port", "0", "--disable-uvicorn-access-log"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stderr is not None
    assert child.stdin is not None
    assert child.stdout is not None
    url = next(line.split(" on ")[1].split(",")[0] for line in server.stderr if "serving" in line)
    threading.Thread(target=lambda: list(server.stderr or ()), daemon=True).start()
    results: dict[str, list[float]] = {"LLM.generate": [], "server": []}

    def one(seed: int) -> tuple[float, float]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{seed}\n")
        child.stdin.flush()
        generated = float(child.stdout.readline())
        served = over_http(url, prompts(count, seed + 1000))
        clear(folder)
        return generated, served

    one(0)  # warm-up
    for seed in range(1, ROUNDS + 1):
        generated, served = one(seed)
        print(f"round {seed}: LLM.generate {generated:.0f}, server {served:.0f} tokens/s", file=sys.stderr)
        results["LLM.generate"].append(generated)
        results["server"].append(served)
    child.stdin.close()
    child.wait()
    server.terminate()
    status = server.wait()
    shutil.rmtree(folder)
    report: dict[str, Any] = {name: [round(v) for v in values] for name, values in results.items()}
    report["ratio"] = round(
        statistics.median(results["server"]) / statistics.median(results["LLM.generate"]), 3
    )
    report |= {"model": model, "prompts": count, "clients": CLIENTS, "layers": LAYERS, "exit": status}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
