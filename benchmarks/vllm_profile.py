"""Where vLLM's time goes with a connector: runs of a row of the gpu suite, then a trace of one.

    python benchmarks/vllm_profile.py --row B --traces FOLDER --output FILE.json
    python benchmarks/vllm_profile.py vllm-layertap --row A --traces FOLDER

Each way (``vllm-no-extraction``, ``vllm-connector``, ``vllm-layertap``) has a process of its own, one after
another. A way is warmed up with a whole run, measured ``--repeat`` times until all files are complete, and
then traced by PyTorch's profiler inside vLLM's engine process over a few steps: the report says how long the
GPU computed in that time. Traces are for a timeline viewer.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from where_time_goes import gpu_busy, kernel_seconds

from layertap.bench.gpu.engine import Engine, Start, Task, max_model_len
from layertap.bench.gpu.rows import choose_rows, scaled_down
from layertap.bench.gpu.vllm_ways import ENVIRONMENT, vllm_options
from layertap.bench.gpu.ways import until_complete
from layertap.vllm.arguments import prepare_cpu

WAYS = ("vllm-no-extraction", "vllm-connector", "vllm-layertap")
_TRACED_STEPS = 6
_MARK = "RESULT "  # vLLM prints, too


def measure(args: argparse.Namespace, way: str) -> dict[str, Any]:
    import torch
    import vllm

    row = choose_rows(args.row)[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.small:
        row = scaled_down(row)
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="layertap-profile-", dir=shm) as folder:
        model = str(row.shape.write(Path(folder, "model")))
        states = Path(folder, "states")
        states.mkdir()
        shape = row.shape
        start = Start(
            Engine.of(row, way), model, max_model_len([row]), str(states), shape.hidden_size, shape.itemsize,
            shape.vocab_size, device,
        )  # fmt: skip
        traces = Path(args.traces, way).absolute()
        traces.mkdir(parents=True, exist_ok=True)
        options = vllm_options(start)
        options["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
        }
        prepare_cpu(options)
        llm = vllm.LLM(**options)
        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

        def run(number: int, most_tokens: int | None = None) -> float:
            task = Task(row.prompts, number, row.tokens, 1, most_tokens)
            prompts = task.token_ids(start.vocab_size)
            begun = time.monotonic()
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            if start.engine.layers is None:
                return sum(map(len, prompts)) / (time.monotonic() - begun)
            paths = [str(o.kv_transfer_params["hidden_states_path"]) for o in outputs]
            measured = until_complete(start, prompts, paths, begun)
            return measured.num_tokens / measured.seconds

        run(0)
        rates = [run(number + 1) for number in range(args.repeat)]
        llm.start_profile()
        traced = run(args.repeat + 1, _TRACED_STEPS * row.token_budget)
        llm.stop_profile()
    return {
        "way": way,
        "row": row.letter,
        "tokens_per_second": rates,
        "traced_tokens_per_second": traced,
        "gpu": gpu_time(traces),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def gpu_time(folder: Path) -> dict[str, Any] | None:
    """Seconds from the first kernel to the last, and those of them in which some kernel ran; None where a
    trace shows none."""
    events: list[dict[str, Any]] = []
    for path in folder.glob("*.json.gz"):
        with gzip.open(path, "rt") as file:
            events += [e for e in json.load(file)["traceEvents"] if e.get("cat") == "kernel"]
    if not events:
        return None
    seconds = (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e6
    busy = gpu_busy(events)
    assert busy is not None
    return {
        "seconds": seconds,
        "busy_seconds": busy * seconds,
        "kernel_seconds": kernel_seconds(events),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    parser.add_argument("--row", default="B", help="of the gpu suite")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--small", action="store_true", help="few prompts of a small model: to try it out")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the child's part
    args = parser.parse_args()
    for way in args.ways:
        if way not in WAYS:
            parser.error(f"way: got {way!r}; allowed: {', '.join(WAYS)}")
    if args.only:
        print(_MARK + json.dumps(measure(args, args.only)), flush=True)
        return
    results = []
    for way in args.ways:
        command = [sys.executable, *sys.argv, "--only", way]
        output = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ENVIRONMENT}
        ).stdout
        line = next(line for line in output.splitlines() if line.startswith(_MARK))
        results.append(json.loads(line.removeprefix(_MARK)))
        rates = ", ".join(f"{rate:,.0f}" for rate in results[-1]["tokens_per_second"])
        print(f"{way}: {rates} tokens/s", file=sys.stderr)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "results": results,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    else:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
