"""One way of getting hidden states, in a process of its own: loaded once, then run as often as the parent
asks.

Speaks JSON lines: after start it prints ``{"ready": ...}``; for each line read it runs the workload once and
prints the result; end of input ends it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from layertap.bench.workload import Workload

Run = Callable[[], dict[str, Any]]


def torch_engine(workload: Workload, output: Path, extract: bool) -> Run:
    """The embedded engine, with files or without any extraction."""
    from layertap import LLM, SamplingParams

    options: dict[str, Any] = {}
    if extract:
        options["layers"] = list(workload.layers)
        options["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(output)},
        }
    llm = LLM(
        workload.model,
        dtype=workload.dtype,
        max_num_batched_tokens=workload.token_budget,
        enable_prefix_caching=workload.prefix_caching,
        skip_tokenizer_init=True,
        enforce_eager=None if not workload.compiled else False,
        **options,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prompts = workload.prompts

    def run() -> dict[str, Any]:
        if workload.prefix_caching:
            llm.reset_prefix_cache()
        start = time.monotonic()
        outputs = llm.generate(prompts, params)
        seconds = time.monotonic() - start
        stored = [o.metrics.stored for o in outputs if o.metrics is not None and o.metrics.stored is not None]
        first = min(stored) - start if stored else None
        if extract:
            missing = [o.request_id for o in outputs if not _exists(o.kv_transfer_params)]
            assert not missing, f"no file for {missing}"
        return {"seconds": seconds, "first_file_seconds": first}

    return run


def _exists(params: dict[str, Any] | None) -> bool:
    return params is not None and os.path.exists(params["hidden_states_path"])


def transformers_engine(workload: Workload, output: Path, batch: int) -> Run:
    """transformers with ``output_hidden_states=True``, padded batches, one file for each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, workload.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(workload.model, dtype=dtype).to(device).eval()
    prompts = workload.prompts
    paths = [str(output / f"{i}.safetensors") for i in range(len(prompts))]

    def run() -> dict[str, Any]:
        start = time.monotonic()
        first = None
        for _ in padded_batches(model, prompts, workload.layers, paths, batch):
            if first is None:
                first = time.monotonic() - start
        return {"seconds": time.monotonic() - start, "first_file_seconds": first}

    return run


def padded_batches(
    model: Any, prompts: Sequence[Sequence[int]], layers: Sequence[int], paths: Sequence[str], batch: int
) -> Iterator[str]:
    """Run transformers over the prompts in padded batches.

    Args:
        batch: prompts in one forward.

    Yields:
        Each prompt's path when its file is written.
    """
    import torch
    from safetensors.torch import save_file

    for begin in range(0, len(prompts), batch):
        group = prompts[begin : begin + batch]
        width = max(map(len, group))
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(group):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        with torch.inference_mode():
            out = model(
                input_ids=ids.to(model.device),
                attention_mask=None if batch == 1 else mask.to(model.device),
                output_hidden_states=True,
                use_cache=False,
                logits_to_keep=1,
            )
            states = torch.stack([out.hidden_states[k] for k in layers], dim=2).cpu()
        for row, prompt in enumerate(group):
            record = {
                "hidden_states": states[row, : len(prompt)].contiguous(),
                "token_ids": torch.tensor(prompt),
            }
            save_file(record, paths[begin + row])
            yield paths[begin + row]


MODES: dict[str, Callable[[Workload, Path], Run]] = {
    "torch": lambda w, o: torch_engine(w, o, extract=True),
    "torch-no-extraction": lambda w, o: torch_engine(w, o, extract=False),
    "transformers": lambda w, o: transformers_engine(w, o, batch=1),
    "transformers-batched": lambda w, o: transformers_engine(w, o, batch=8),
}


def main() -> None:
    mode, workload_path, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    started = time.monotonic()
    answers = os.fdopen(os.dup(1), "w")  # libraries may print to standard output
    os.dup2(2, 1)
    workload = Workload.read(workload_path)
    output.mkdir(parents=True, exist_ok=True)
    run = MODES[mode](workload, output)

    def say(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    say(ready=True, start_seconds=time.monotonic() - started)
    for _ in sys.stdin:
        shutil.rmtree(output)
        output.mkdir()
        result = run()
        result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        say(**result)


if __name__ == "__main__":
    main()
