"""Runs the peers, each in a process of its own, in turns: so that a machine that slows down slows all
alike. Who waits for its turn is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layertap.bench.process import JsonProcess
from layertap.bench.workload import Workload

VLLM_PEERS = {"vllm-no-extraction": "base", "vllm": "extract"}


@dataclass(slots=True)
class PeerResult:
    """All measured runs of one peer."""

    name: str
    num_tokens: int
    start_seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Of a peer that has an environment of its own."""
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each run, ascending."""
        return sorted(self.num_tokens / r["seconds"] for r in self.runs)

    @property
    def median_rate(self) -> float:
        rates = self.rates
        middle = len(rates) // 2
        return rates[middle] if len(rates) % 2 else (rates[middle - 1] + rates[middle]) / 2

    def to_json(self) -> dict[str, Any]:
        rates = self.rates
        return {
            "tokens_per_second": {"min": rates[0], "median": self.median_rate, "max": rates[-1]},
            "first_file_seconds": min((r.get("first_file_seconds") or 0 for r in self.runs), default=None),
            "peak_rss_bytes": max(r["peak_rss_bytes"] for r in self.runs),
            "start_seconds": self.start_seconds,
            **({"versions": self.versions} if self.versions else {}),
            "runs": self.runs,
        }


def environment(threads: int | None) -> dict[str, str]:
    """The peers' environment: the libraries' own choice of threads, unless one is given; no network."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    env["HF_HUB_OFFLINE"] = "1"
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


class Worker(JsonProcess):
    """A running :mod:`layertap.bench.worker`, or :mod:`layertap.bench.vllm_peer`."""

    def __init__(self, mode: str, command: Sequence[str], log: Path, env: dict[str, str]) -> None:
        super().__init__(mode, command, log, env)
        self.start_seconds: float | None = None

    def run(self) -> dict[str, Any]:
        """One turn. Between turns it is stopped: some engines keep a core busy while they wait."""
        self.resume()
        self.ask(run=True)
        answer = self.answer()
        self.pause()
        return answer

    def pause(self) -> None:
        """Stop its processes where they are."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def close(self, patience: float = 30.0) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        super().close(patience)


def _command(mode: str, workload: Workload, folder: Path, vllm_python: str | None) -> list[str]:
    """What starts a peer."""
    output = folder / mode
    if mode not in VLLM_PEERS:
        path = folder / "workload.json"
        path.write_text(json.dumps(workload.to_json()))
        return [sys.executable, "-m", "layertap.bench.worker", mode, str(path), str(output)]
    assert vllm_python is not None
    job = {
        "model": workload.model,
        "prompts": workload.prompts,
        "layers": list(workload.layers),
        "dtype": workload.dtype,
        "token_budget": workload.token_budget,
        "output": str(output),
        "prefix_caching": workload.prefix_caching,
    }
    path = folder / f"{mode}.json"
    path.write_text(json.dumps(job))
    return [vllm_python, str(Path(__file__).parent / "vllm_peer.py"), str(path), VLLM_PEERS[mode]]


def run_peers(
    workload: Workload,
    modes: Sequence[str],
    repeat: int,
    folder: Path,
    vllm_python: str | None = None,
    threads: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[PeerResult]:
    """Measure every mode ``repeat`` times after one warm-up.

    Args:
        modes: of :data:`layertap.bench.worker.MODES` and :data:`VLLM_PEERS`.
        folder: for files, inputs and logs.
        vllm_python: the Python that has vLLM.
        note: told what is going on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = workload.num_tokens
    results = {mode: PeerResult(mode, total) for mode in modes}
    env = environment(threads)
    with ExitStack() as stack:
        workers: list[Worker] = []
        for mode in modes:
            note(f"{mode}: starting")
            worker = Worker(mode, _command(mode, workload, folder, vllm_python), folder / f"{mode}.log", env)
            stack.callback(worker.close)
            ready = worker.answer()
            results[mode].start_seconds = ready["start_seconds"]
            results[mode].versions = ready.get("versions", {})
            worker.pause()
            workers.append(worker)
        for worker in workers:
            note(f"{worker.name}: warming up")
            worker.run()
        for turn in range(repeat):
            # Every other round backwards: what ran before leaves traces in caches and memory.
            for worker in workers if turn % 2 == 0 else reversed(workers):
                result = worker.run()
                results[worker.name].runs.append(result)
                note(f"{worker.name}: run {turn + 1} of {repeat}, {total / result['seconds']:,.0f} tokens/s")
    return [results[mode] for mode in modes]


def missing_modules(python: str, names: Sequence[str]) -> list[str]:
    """Which of these modules a Python cannot import (asked without importing them); all, if there is no such
    Python."""
    probe = "import importlib.util, sys\nfor n in sys.argv[1:]: importlib.util.find_spec(n) or print(n)"
    try:
        done = subprocess.run([python, "-c", probe, *names], stdout=subprocess.PIPE, text=True, check=False)
    except OSError:
        return list(names)
    return done.stdout.split() if done.returncode == 0 else list(names)
