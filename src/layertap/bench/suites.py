"""The benchmark suites: what each measures, and the table it prints."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layertap.bench.machine import describe_machine
from layertap.bench.peers import VLLM_PEERS, PeerResult, missing_modules, run_peers
from layertap.bench.worker import MODES
from layertap.bench.workload import Workload
from layertap.errors import InvalidInputError

Note = Callable[[str], None]
PEERS = (*MODES, *VLLM_PEERS)


@dataclasses.dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line says, beside the workload."""

    peers: tuple[str, ...] = PEERS
    repeat: int = 3
    vllm_python: str = sys.executable
    threads: int | None = None
    folder: Path | None = None
    """For files and logs; None takes a temporary folder, in memory where the machine has one."""


def base_workload(model: str, **changes: Any) -> Workload:
    """The CPU workload, for a model that is given by any name that the package knows."""
    from layertap.config import EngineConfig
    from layertap.engine import loader

    source = loader.prepare_source(model)
    hf_config = loader.load_config(source, EngineConfig(model))
    layers = changes.pop("layers", None) or "eagle3"
    from layertap.layers import parse_layers

    ids = parse_layers(layers, loader.num_hidden_layers(hf_config))
    if not all(isinstance(i, int) for i in ids):
        raise InvalidInputError("layers", layers, "layer ids; the peers have no 'norm'")
    vocab = loader.text_config(hf_config).vocab_size
    return Workload(source.path, tuple(i for i in ids if isinstance(i, int)), vocab_size=vocab, **changes)


def run_cpu(workload: Workload, options: BenchOptions, note: Note) -> dict[str, Any]:
    """All peers over the same prompts."""
    peers = list(options.peers)
    if any(p in VLLM_PEERS for p in peers) and missing_modules(options.vllm_python, ["vllm"]):
        note(f"vllm is left out: {options.vllm_python} cannot import it (--vllm-python names one that can)")
        peers = [p for p in peers if p not in VLLM_PEERS]
    results = _measure(workload, peers, options, note)
    return {"workload": workload.to_json(), "peers": {r.name: r.to_json() for r in results}}


def run_prefix(workload: Workload, options: BenchOptions, note: Note) -> dict[str, Any]:
    """Prompts with a common beginning, with and without prefix caching."""
    shared = dataclasses.replace(
        workload, num_prompts=64, shared_prefix=512, min_tokens=64, max_tokens=64, prefix_caching=True
    )
    result: dict[str, Any] = {"workload": shared.to_json()}
    for name, caching in (("prefix_caching", True), ("no_prefix_caching", False)):
        run = dataclasses.replace(shared, prefix_caching=caching)
        result[name] = _measure(run, ["torch"], options, note)[0].to_json()
    on, off = (result[k]["tokens_per_second"]["median"] for k in ("prefix_caching", "no_prefix_caching"))
    result["speedup"] = on / off
    return result


def run_memory(workload: Workload, options: BenchOptions, note: Note) -> dict[str, Any]:
    """Peak resident memory for few and for many prompts into files."""
    result: dict[str, Any] = {}
    once = dataclasses.replace(options, repeat=1)
    for count in (64, 2000):
        run = dataclasses.replace(workload, num_prompts=count, max_tokens=64)
        measured = _measure(run, ["torch"], once, note)[0].to_json()
        result[f"prompts_{count}"] = {"workload": run.to_json(), "peak_rss_bytes": measured["peak_rss_bytes"]}
    few, many = (result[f"prompts_{n}"]["peak_rss_bytes"] for n in (64, 2000))
    result["growth"] = many / few - 1
    return result


SUITES: dict[str, Callable[[Workload, BenchOptions, Note], dict[str, Any]]] = {
    "cpu": run_cpu,
    "prefix": run_prefix,
    "memory": run_memory,
}


def _measure(workload: Workload, peers: list[str], options: BenchOptions, note: Note) -> list[PeerResult]:
    def measure(folder: Path) -> list[PeerResult]:
        return run_peers(workload, peers, options.repeat, folder, options.vllm_python, options.threads, note)

    if options.folder is not None:
        return measure(options.folder)
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir=shm) as folder:
        return measure(Path(folder))


def run_suite(
    name: str, workload: Workload, options: BenchOptions, command: str, note: Note
) -> dict[str, Any]:
    """Run a suite and return what goes into its result file."""
    body = SUITES[name](workload, options, note)
    return {"suite": name, "command": command, "machine": describe_machine(), **body}
