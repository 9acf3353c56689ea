"""Runs a workload through vLLM's CPU build, with and without extraction: the peer of ``layertap bench``.

    python vllm_peer.py workload.json MODE

Run by a Python that has vLLM; needs torch and safetensors besides, and nothing of layertap. MODE is ``base``
(no extraction) or ``extract``. Speaks JSON lines as :mod:`layertap.bench.worker` does: after start it prints
``ready``, ``start_seconds`` (imports included) and ``versions``; for each line read it runs the workload once
and prints ``seconds`` (until every output and every file was complete), ``generate_seconds``, with files
``first_file_seconds``, and ``peak_rss_bytes`` (summed over the engine's processes, sampled). The end of its
input ends it. ``workload.json`` holds:

    model              folder of a Hugging Face model
    prompts            list of prompt_token_ids
    layers             ids of the boundaries to extract
    dtype              "bfloat16", "float32"
    token_budget       tokens a step (max_num_batched_tokens)
    output             folder for the files; emptied
    prefix_caching     default false
    engine             further keyword arguments of vllm.LLM (default none)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE_TIMEOUT = 120.0

# This script's own folder is not a place to import from: its neighbours' names may shadow real packages.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]


class PeakMemory:
    """The largest resident set of this process and its descendants, sampled twenty times a second."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, sum(_rss(pid) for pid in _family(os.getpid())))
            time.sleep(0.05)


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _family(int(child))


def _rss(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def engine_arguments(workload: dict[str, Any], mode: str, folder: Path) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``."""
    longest = max(len(p) for p in workload["prompts"])
    arguments: dict[str, Any] = {
        "model": workload["model"],
        "dtype": workload["dtype"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": longest + 16,
        "max_num_batched_tokens": workload["token_budget"],
        "max_num_seqs": 256,
        "enable_prefix_caching": bool(workload.get("prefix_caching", False)),
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 2 << 30,
        "disable_log_stats": True,
    }
    if mode == "extract":
        draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": workload["layers"]}}
        arguments["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": draft,
        }
        arguments["kv_transfer_config"] = {
            "kv_connector": "PeerConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "vllm_peer_connector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    return arguments | dict(workload.get("engine", {}))


def run_once(llm: Any, params: Any, prompts: list[list[int]], folder: Path) -> dict[str, float]:
    """One pass over the prompts, until every file is under its final name."""
    inputs = [{"prompt_token_ids": p} for p in prompts]
    start_wall, start = time.time(), time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    generated = time.perf_counter() - start
    handles = [getattr(output, "kv_transfer_params", None) for output in outputs]
    missing = {Path(handle["hidden_states_path"]) for handle in handles if handle}
    paths = sorted(missing)
    while missing:
        missing = {path for path in missing if not path.exists()}
        if time.perf_counter() - start > generated + FILE_TIMEOUT:
            raise TimeoutError(f"{len(missing)} of {len(paths)} files did not come")
        if missing:
            time.sleep(0.002)
    seconds = time.perf_counter() - start
    tokens = sum(len(p) for p in prompts)
    result = {"seconds": seconds, "generate_seconds": generated, "tokens_per_second": tokens / seconds}
    if paths:
        result["files"] = len(paths)
        result["bytes"] = sum(path.stat().st_size for path in paths)
        result["first_file_seconds"] = min(path.stat().st_mtime for path in paths) - start_wall
    return result


def clear(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


@contextlib.contextmanager
def prepared_environment() -> Iterator[None]:
    """What vLLM's processes find: the connector of this peer, and settings for a CPU."""
    with tempfile.TemporaryDirectory(prefix="vllm-peer-") as module_folder:
        shutil.copy(HERE / "vllm_peer_connector.py", module_folder)
        sys.path.insert(0, module_folder)
        paths = (module_folder, os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        for name, value in (
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            ("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))),  # unset, vLLM takes one thread
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),  # in one process the last files would never be written
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
        ):
            os.environ.setdefault(name, value)
        yield


def main(path: str, mode: str) -> None:
    # Answers go to the real standard output; everything that vLLM prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    workload = json.loads(Path(path).read_text())
    folder = Path(workload["output"])
    folder.mkdir(parents=True, exist_ok=True)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    with prepared_environment():
        memory = PeakMemory()
        start = time.perf_counter()
        import safetensors
        import torch
        import transformers
        import vllm

        llm = vllm.LLM(**engine_arguments(workload, mode, folder))
        versions = {m.__name__: str(m.__version__) for m in (vllm, torch, transformers, safetensors)}
        say(ready=True, start_seconds=time.perf_counter() - start, versions=versions)
        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for _ in sys.stdin:
            clear(folder)
            say(**run_once(llm, params, workload["prompts"], folder), peak_rss_bytes=memory.peak)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in ("base", "extract"):
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2])
