"""vLLM's own example connector against layertap's, inside vLLM, until all files are complete.

    python benchmarks/vllm_connectors.py MODEL LAYERS NUM_PROMPTS LENGTH MODE [MODE ...] --output FILE.json

MODE is ``base`` (no extraction), ``example`` (vLLM's ExampleHiddenStatesConnector) or ``layertap``. Each mode
runs in a process of its own, one after another, on the same random tokens with random weights
(``load_format="dummy"``); each is warmed up and then measured ``--repeat`` times. Files go to ``/dev/shm``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONNECTORS: dict[str, dict[str, Any]] = {
    "example": {"kv_connector": "ExampleHiddenStatesConnector"},
    "layertap": {"kv_connector": "LayertapConnector", "kv_connector_module_path": "layertap.vllm"},
}
EXTRA: dict[str, dict[str, Any]] = {
    "example": {"use_synchronization_lock": False},
    "layertap": {},
}


def measure(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    layers = [int(x) for x in args.layers.split(",")]
    folder = Path("/dev/shm") / f"layertap-vllm-{mode}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options: dict[str, Any] = {}
    if mode != "base":
        options["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        }
        extra = {"shared_storage_path": str(folder), **EXTRA[mode]}
        options["kv_transfer_config"] = {
            **CONNECTORS[mode],
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        }
    started = time.monotonic()
    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(4096, args.length + 16),
        max_num_batched_tokens=16384,
        max_num_seqs=512,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.85,
        disable_log_stats=True,
        **options,
    )
    start_seconds = time.monotonic() - started
    config = json.loads((Path(args.model) / "config.json").read_text())
    size = args.length * len(layers) * config["hidden_size"] * 2
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(10, config["vocab_size"] - 10) for _ in range(args.length)]}
        for _ in range(args.num_prompts)
    ]
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def run(batch: list[Any]) -> float:
        begun = time.monotonic()
        outputs = llm.generate(batch, params, use_tqdm=False)
        if mode != "base":
            waiting = [o.kv_transfer_params["hidden_states_path"] for o in outputs]
            deadline = time.monotonic() + 120
            while waiting:
                waiting = [p for p in waiting if not complete(p, size)]
                assert time.monotonic() < deadline, f"{len(waiting)} files are not complete after 120 s"
                if waiting:
                    time.sleep(0.002)
        seconds = time.monotonic() - begun
        for file in folder.iterdir():
            if file.suffix == ".safetensors":
                file.unlink()
        return seconds

    run(prompts[:16])
    time.sleep(1)
    runs = []
    for _ in range(args.repeat):
        runs.append(run(prompts))
        time.sleep(1)
    total = args.length * args.num_prompts
    rates = sorted(total / s for s in runs)
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "mode": mode,
        "start_seconds": start_seconds,
        "seconds": runs,
        "tokens_per_second": {"min": rates[0], "median": rates[len(rates) // 2], "max": rates[-1]},
    }


def complete(path: str, size: int) -> bool:
    if os.path.exists(path + ".error"):
        raise RuntimeError(Path(path + ".error").read_text())
    try:
        return os.path.getsize(path) >= size
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("layers")
    parser.add_argument("num_prompts", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("modes", nargs="+", choices=["base", *CONNECTORS])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(measure(args, args.modes[0])), flush=True)
        return
    import torch

    results = []
    for mode in args.modes:
        command = [
            sys.executable,
            __file__,
            args.model,
            args.layers,
            str(args.num_prompts),
            str(args.length),
            mode,
        ]
        command += ["--repeat", str(args.repeat), "--child"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        if line is None:
            print(f"{mode} failed:\n{done.stdout[-3000:]}", flush=True)
            continue
        results.append(json.loads(line.removeprefix("RESULT ")))
        print(
            mode, {k: round(v) for k, v in results[-1]["tokens_per_second"].items()}, "tokens/s", flush=True
        )
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "vllm")},
        "command": " ".join(["python", *sys.argv]),
        "workload": {
            "model": Path(args.model).name, "layers": args.layers, "num_prompts": args.num_prompts,
            "length": args.length, "dtype": "bfloat16", "weights": "random", "tokens_a_step": 16384,
            "prefix_caching": False,
        },
        "results": results,
    }  # fmt: skip
    if args.output:
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
