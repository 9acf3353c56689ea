"""vLLM in processes of its own: two tensor-parallel ranks, ``vllm serve`` as it is documented, and with two
data-parallel engines."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reference
from layertap import ExtractionError, reader
from vllm_engine.support import SHAPES, leftovers

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]
IDS = [0, 3, 5]

TWO_RANKS = """
import random, sys
from layertap import LLM, SamplingParams

def main():
    model, folder = sys.argv[1:]
    extra = {"shared_storage_path": folder}
    transfer = {"kv_connector": "LayertapConnector", "kv_connector_extra_config": extra}
    options = dict(dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=256,
                   max_num_seqs=8, block_size=32, num_gpu_blocks_override=24, enforce_eager=True,
                   kv_cache_memory_bytes=64 << 20)
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 160) for _ in range(draw.randrange(1, 60))] for _ in range(300)]
    with LLM(model, engine="vllm", layers=[0, 3, 5], kv_transfer_config=transfer, tensor_parallel_size=2,
             **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
    paths = [o.kv_transfer_params["hidden_states_path"] for o in outputs]
    assert len(set(paths)) == 300
    print(paths[7], *prompts[7])

if __name__ == "__main__":
    main()
"""


def environment(**more: str) -> dict[str, str]:
    """For engines with processes of their own."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
        ),
        **more,
    }


def test_two_tensor_parallel_ranks_write_one_file_each_and_leak_nothing(
    python: str, tiny: Callable[..., str], tmp_path: Path
) -> None:
    """300 requests through 24 blocks: blocks that are not given back would end it."""
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    folder = tmp_path / "states"
    model = tiny("llama", **SHAPES["llama"])
    done = subprocess.run(
        [python, str(script), model, str(folder)],
        env=environment(VLLM_CPU_OMP_THREADS_BIND="0|1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = leftovers(folder)
    assert len(files) == 300
    assert all(name.endswith(".safetensors") for name in files)
    path, *ids = done.stdout.strip().splitlines()[-1].split()
    states = reader.open(path, timeout=0)
    token_ids = [int(i) for i in ids]
    assert states.token_ids.tolist() == token_ids
    reference.assert_states(states.hidden_states, reference.states(model, token_ids)[:, IDS])


class Server:
    """``vllm serve`` on a free port.

    Args:
        flags: more of vLLM's; the last of two that name the same thing counts.
    """

    def __init__(self, python: str, model: str, folder: Path, log: Path, flags: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model = model
        self.folder = folder
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": IDS}},
        }
        transfer = {
            "kv_connector": "LayertapConnector",
            "kv_connector_module_path": "layertap.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        command = [
            python, "-m", "vllm.entrypoints.cli.main", "serve", model,
            "--speculative_config", json.dumps(speculative),
            "--kv_transfer_config", json.dumps(transfer),
            "--port", str(self.port), "--host", "127.0.0.1", "--skip-tokenizer-init", "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "64",
            "--block-size", "32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(16 << 20),
            "--gpu-memory-utilization", "0.2", *flags,
        ]  # fmt: skip
        self._log = log.open("w")
        self.process = subprocess.Popen(
            command,
            env=environment(VLLM_CPU_OMP_THREADS_BIND="nobind"),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        deadline = time.monotonic() + 240
        while True:
            assert self.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def complete(self, token_ids: list[int], timeout: float = 60, **more: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, **more}
        body |= {"detokenize": False} if "detokenize" not in more else {}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return dict(json.load(answer))

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            return str(answer.read(), "utf-8")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def server(
    python: str, tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("serve")
    server = Server(python, tiny("llama", **SHAPES["llama"]), base / "states", base / "log")
    yield server
    server.close()


def test_vllms_documented_command_works_with_our_connector(server: Server) -> None:
    ids = [(i * 7) % 140 + 10 for i in range(200)]
    path = server.complete(ids)["kv_transfer_params"]["hidden_states_path"]
    states = reader.open(path, timeout=30)
    assert states.token_ids.tolist() == ids
    reference.assert_states(states.hidden_states, reference.states(server.model, ids)[:, IDS])
    assert os.path.exists(path + ".lock")


def test_vllms_own_reader_reads_what_we_write(server: Server) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    def one(seed: int) -> None:
        ids = [(i * seed) % 140 + 10 for i in range(40 * seed)]
        path = server.complete(ids)["kv_transfer_params"]["hidden_states_path"]
        loaded = load_hidden_states(path)  # opens the lock at once: it is there before the answer
        assert loaded["token_ids"].tolist() == ids
        assert loaded["hidden_states"].shape == (len(ids), 3, 64)
        cleanup_hidden_states(path)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(one, range(1, 13)))


def test_a_request_chooses_what_is_kept(server: Server) -> None:
    wish = {"layers": [5, 0, 5], "tokens": "last", "dtype": "float16"}
    path = server.complete([20] * 30, kv_transfer_params=wish)["kv_transfer_params"]["hidden_states_path"]
    states = reader.open(path, timeout=30)
    assert states.hidden_states.shape == (1, 3, 64)
    assert states.layer_ids == (5, 0, 5)


def test_a_wrong_wish_is_told_in_the_answer_and_to_the_reader(server: Server) -> None:
    answer = server.complete([20] * 30, kv_transfer_params={"layers": [4]})["kv_transfer_params"]
    assert "kv_transfer_params.layers" in answer["error"]
    with pytest.raises(ExtractionError, match="kv_transfer_params"):
        reader.open(answer["hidden_states_path"], timeout=30)


def test_clients_that_go_away_leave_no_locks_and_no_blocks_taken(server: Server) -> None:
    for timeout in (0.001, 0.01, 0.03, 0.1):
        with ThreadPoolExecutor(8) as threads:
            for i in range(8):
                threads.submit(server.complete, [i + 10] * 400, timeout, max_tokens=64, ignore_eos=True)
    # Everything that the cache holds, together: possible only if no block was lost.
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda seed: server.complete([seed + 30] * 450), range(4)))
    for answer in answers:
        assert len(reader.open(answer["kv_transfer_params"]["hidden_states_path"], timeout=30)) == 450
    deadline = time.monotonic() + 20
    while any(
        _is_locked(server.folder / name) for name in leftovers(server.folder) if name.endswith(".lock")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not [name for name in leftovers(server.folder) if name.endswith(".tmp")]


def test_two_data_parallel_engines_write_one_file_for_each_request_and_leak_nothing(
    python: str, tiny: Callable[..., str], tmp_path: Path
) -> None:
    """300 requests through two engines of 24 blocks each, into one folder."""
    model = tiny("llama", **SHAPES["llama"])
    folder = tmp_path / "states"
    flags = [
        "--data-parallel-size", "2", "--api-server-count", "1", "--num-gpu-blocks-override", "24",
        "--max-model-len", "128",
    ]  # fmt: skip
    server = Server(python, model, folder, tmp_path / "log", flags)
    try:
        draw = random.Random(0)
        prompts = [[draw.randrange(10, 160) for _ in range(draw.randrange(1, 60))] for _ in range(300)]
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(server.complete, prompts))
        paths = [answer["kv_transfer_params"]["hidden_states_path"] for answer in answers]
        assert len(set(paths)) == 300
        for path, ids in zip(paths, prompts, strict=True):
            assert reader.open(path, timeout=30).token_ids.tolist() == ids
        assert {n for n in leftovers(folder) if not n.endswith(".lock")} == {
            os.path.basename(p) for p in paths
        }
        assert not any(_is_locked(Path(path + ".lock")) for path in paths)
        for path, ids in list(zip(paths, prompts, strict=True))[:20]:
            right = reference.states(model, ids)[:, IDS]
            reference.assert_states(reader.open(path, timeout=0).hidden_states, right)
        done = re.findall(
            r'vllm:request_success_total{engine="(\d)",finished_reason="length".*} (\d+)', server.metrics()
        )
        assert sorted(engine for engine, count in done if float(count) > 0) == ["0", "1"]
    finally:
        server.close()


def _is_locked(path: Path) -> bool:
    import fcntl

    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
