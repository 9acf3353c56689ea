"""Runs the peers, each in a process of its own, in turns: so that a machine that slows down slows all
alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layertap.bench.process import JsonProcess, PeerFailedError
from layertap.bench.workload import Workload

VLLM_PEERS = {"vllm-no-extraction": "base", "vllm": "extract"}


@dataclass(slots=True)
class PeerResult:
    """All measured runs of one peer."""

    name: str
    num_tokens: int
    start_seconds: float | None = None
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
            "first_file_seconds": min((r["first_file_seconds"] or 0 for r in self.runs), default=None),
            "peak_rss_bytes": max(r["peak_rss_bytes"] for r in self.runs),
            "start_seconds": self.start_seconds,
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
    """A running :mod:`layertap.bench.worker`."""

    def __init__(self, mode: str, workload: Path, output: Path, log: Path, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "layertap.bench.worker", mode, str(workload), str(output)]
        super().__init__(mode, command, log, env)
        self.start_seconds: float | None = None

    def run(self) -> dict[str, Any]:
        self.ask(run=True)
        return self.answer()


@contextmanager
def _workers(
    modes: Sequence[str], workload: Path, folder: Path, env: dict[str, str]
) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for mode in modes:
            workers.append(Worker(mode, workload, folder / mode, folder / f"{mode}.log", env))
            workers[-1].start_seconds = workers[-1].answer()["start_seconds"]
        yield workers
    finally:
        for worker in workers:
            worker.close()


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
    path = folder / "workload.json"
    path.write_text(json.dumps(workload.to_json()))
    total = workload.num_tokens
    results = {mode: PeerResult(mode, total) for mode in modes}
    env = environment(threads)
    own = [mode for mode in modes if mode not in VLLM_PEERS]
    with _workers(own, path, folder, env) as workers:
        for worker in workers:
            results[worker.name].start_seconds = worker.start_seconds
            note(f"{worker.name}: warming up")
            worker.run()
        for turn in range(repeat):
            for worker in workers:
                result = worker.run()
                results[worker.name].runs.append(result)
                note(f"{worker.name}: run {turn + 1} of {repeat}, {total / result['seconds']:,.0f} tokens/s")
    wanted = [mode for mode in modes if mode in VLLM_PEERS]
    if wanted:
        assert vllm_python is not None
        _run_vllm(workload, wanted, repeat, folder, vllm_python, env, results, note)
    return [results[mode] for mode in modes]


def _run_vllm(
    workload: Workload,
    wanted: Sequence[str],
    repeat: int,
    folder: Path,
    python: str,
    env: dict[str, str],
    results: dict[str, PeerResult],
    note: Callable[[str], None],
) -> None:
    job = {
        "model": workload.model,
        "prompts": workload.prompts,
        "layers": list(workload.layers),
        "dtype": workload.dtype,
        "token_budget": workload.token_budget,
        "output": str(folder / "vllm"),
        "repeat": repeat,
        "modes": [VLLM_PEERS[mode] for mode in wanted],
        "prefix_caching": workload.prefix_caching,
    }
    path = folder / "vllm.json"
    path.write_text(json.dumps(job))
    note("vllm: starting")
    script = Path(__file__).parent / "vllm_peer.py"
    with (folder / "vllm.log").open("w") as log:
        done = subprocess.run(
            [python, str(script), str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
            check=False,
        )
    if done.returncode != 0:
        tail = (folder / "vllm.log").read_text()[-800:]
        raise PeerFailedError(f"the vLLM peer ended with status {done.returncode}:\n{tail}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    for mode in wanted:
        measured = answer["modes"][VLLM_PEERS[mode]]
        results[mode].start_seconds = measured["start_seconds"]
        for run in measured["runs"]:
            results[mode].runs.append(
                {
                    "seconds": run["seconds"],
                    "first_file_seconds": run.get("first_file_seconds"),
                    "peak_rss_bytes": measured["peak_rss_bytes"],
                }
            )
            note(f"{mode}: {workload.num_tokens / run['seconds']:,.0f} tokens/s")


def missing_modules(python: str, names: Sequence[str]) -> list[str]:
    """Which of these modules a Python cannot import (asked without importing them); all, if there is no such
    Python."""
    probe = "import importlib.util, sys\nfor n in sys.argv[1:]: importlib.util.find_spec(n) or print(n)"
    try:
        done = subprocess.run([python, "-c", probe, *names], stdout=subprocess.PIPE, text=True, check=False)
    except OSError:
        return list(names)
    return done.stdout.split() if done.returncode == 0 else list(names)
