"""What extraction costs, step by step: the same prompts with more and more of the way switched on.

    python benchmarks/where_time_goes.py MODEL LAYERS NUM_PROMPTS LENGTH [WAY ...] --output FILE.json

A WAY is ``none`` (no extraction), ``drop`` (states are gathered and copied to the host, then dropped), or
``files:N`` (written to ``/dev/shm`` by N threads). Each way runs in a process of its own with random weights
(``load_format="dummy"``: MODEL may be a folder with nothing but a ``config.json``), is warmed up and then
measured ``--repeat`` times. Beside tokens/s it reports where the engine's thread and the writers' threads
spend their time; ``--trace FOLDER`` also writes a trace of one run for a timeline viewer, and says for how
much of it the GPU was busy, and which kernels took the time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from layertap import LLM, SamplingParams
from layertap.connectors.producing import ProducingConnector
from layertap.sinks.base import RecordSpec, RecordWriter, Sink

_KINDS = 24
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
WAYS = ("none", "drop", "files:1", "files:4", "files:8")


class DroppingWriter(RecordWriter):
    def write(self, hidden_TLH: torch.Tensor, scales_T11: torch.Tensor | None = None) -> None:
        pass

    def commit(self) -> str:
        return "dropped"

    def abort(self) -> None:
        pass


class DroppingSink(Sink):
    """Takes everything and keeps nothing: what is left is the way to it."""

    def open(self, spec: RecordSpec) -> RecordWriter:
        return DroppingWriter()

    def handle(self, request_id: str) -> str:
        return "dropped"


class DroppingConnector(ProducingConnector):
    handle_field = "hidden_states_handle"

    def make_sink(self, options: Mapping[str, Any]) -> Sink:
        return DroppingSink()


def connector_of(way: str, folder: Path) -> dict[str, Any]:
    if way == "drop":
        return {
            "kv_connector": "DroppingConnector",
            "kv_connector_module_path": __file__,
            "kv_role": "kv_producer",
        }
    extra = {"shared_storage_path": str(folder), "num_writer_threads": int(way.removeprefix("files:"))}
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


class StepTimer:
    """Counts what the engine's thread does in a run. ``launch`` is the time it takes to put a step's work on
    the device; on a CPU that is the work itself."""

    def __init__(self, llm: LLM) -> None:
        self.launch_seconds = 0.0
        self.steps = 0
        runner = llm._core.runner
        execute = runner.execute

        def timed(scheduled: Any) -> Any:
            begun = time.monotonic()
            try:
                return execute(scheduled)
            finally:
                self.launch_seconds += time.monotonic() - begun
                self.steps += 1

        runner.execute = timed  # type: ignore[method-assign]


def kernel_seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each kind of kernel or copy, the longest first."""
    seconds: Counter[str] = Counter()
    for e in events:
        if e.get("cat") in _ON_GPU:
            seconds[e["name"][:100]] += e["dur"] / 1e6
    return dict(seconds.most_common(_KINDS))


def gpu_gaps(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The longest times in which the GPU did nothing: when, seen from the end of its work, and how long."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _ON_GPU)
    gaps, end = [], spans[0][0]
    for a, b in spans:
        if a > end:
            gaps.append((a - end, end))
        end = max(end, b)
    return [((at - end) / 1e6, length / 1e6) for length, at in sorted(gaps, reverse=True)[:8]]


def gpu_busy(events: list[dict[str, Any]]) -> float | None:
    """Share of the time from the first to the last kernel in which at least one kernel or copy ran."""
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in _ON_GPU
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for a, b in spans:
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    return busy / (end - spans[0][0])


def measure(args: argparse.Namespace, way: str) -> dict[str, Any]:
    shm = Path("/dev/shm")
    folder = (shm if shm.is_dir() else Path("/tmp")) / "layertap-where-time-goes"
    shutil.rmtree(folder, ignore_errors=True)
    options: dict[str, Any] = {}
    if way != "none":
        options["layers"] = [int(x) for x in args.layers.split(",")]
        options["kv_transfer_config"] = connector_of(way, folder)
    if args.budget is not None:
        options["max_num_batched_tokens"] = args.budget
    llm = LLM(
        args.model,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **options,
    )
    rng = random.Random(0)
    vocab = llm._core.verifier.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(args.length)] for _ in range(args.num_prompts)]
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    timer = StepTimer(llm)

    def connector() -> dict[str, float]:
        stats: dict[str, float] = llm.stats()["connector"]
        return {k: v for k, v in stats.items() if k.endswith("_seconds")}

    def run() -> dict[str, Any]:
        for old in folder.glob("*.safetensors"):
            old.unlink()
        before, launched, steps = connector(), timer.launch_seconds, timer.steps
        begun = time.monotonic()
        outputs = llm.generate(prompts, params)
        seconds = time.monotonic() - begun
        assert all(o.error is None for o in outputs)
        return {
            "seconds": seconds,
            "tokens_per_second": args.num_prompts * args.length / seconds,
            "steps": timer.steps - steps,
            "launch_seconds": timer.launch_seconds - launched,
            **{k: v - before[k] for k, v in connector().items()},
        }

    result: dict[str, Any] = {"way": way, "warm_up": run()}
    result["runs"] = [run() for _ in range(args.repeat)]
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
        file = args.trace / f"{way.replace(':', '-')}.json"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            traced = run()
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
        result["gpu_busy"] = gpu_busy(events)
        result["kernel_seconds"] = kernel_seconds(events)
        if torch.cuda.is_available():
            compute = [e for e in events if e.get("cat") == "kernel" and not e["name"].startswith("_gather")]
            result["gaps"] = gpu_gaps(events)
            first, last = min(e["ts"] for e in compute), max(e["ts"] + e["dur"] for e in compute)
            result["traced_seconds"], result["compute_seconds"] = traced["seconds"], (last - first) / 1e6
    llm.close()
    shutil.rmtree(folder, ignore_errors=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("layers")
    parser.add_argument("num_prompts", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    parser.add_argument("--budget", type=int, help="tokens a step")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the child's part
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(measure(args, args.only)))
        return
    results = []
    for way in args.ways:
        command = [sys.executable, *sys.argv, "--only", way]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        result = json.loads(output.splitlines()[-1])
        results.append(result)
        best = sorted(result["runs"], key=lambda r: r["seconds"])[len(result["runs"]) // 2]
        parts = ", ".join(
            f"{k.removesuffix('_seconds')} {v:.2f} s" for k, v in best.items() if k.endswith("_seconds")
        )
        busy = f", GPU busy {result['gpu_busy']:.0%}" if result.get("gpu_busy") else ""
        print(
            f"{way}: {best['tokens_per_second']:,.0f} tokens/s in {best['seconds']:.2f} s; {parts}{busy}",
            flush=True,
        )
        if "gaps" in result:
            gaps = ", ".join(f"{length * 1e3:.1f} ms at {at:.3f} s" for at, length in result["gaps"])
            print(
                f"  traced: {result['traced_seconds']:.3f} s, first to last kernel of the model "
                f"{result['compute_seconds']:.3f} s; GPU idle for {gaps}"
            )
        for name, seconds in result.get("kernel_seconds", {}).items():
            print(f"  {seconds * 1e3:9.1f} ms  {name}", flush=True)
        if args.output is not None:
            device = (
                torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
            )
            report = {
                "command": " ".join(["python", *sys.argv]),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "device": device,
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "results": results,
            }
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
