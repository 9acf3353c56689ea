"""The embedded engine's ways, and transformers': loaded once, then run as often as asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layertap.bench.gpu import files
from layertap.bench.gpu.engine import MEMORY_SHARE, Start, Task


@dataclass(slots=True)
class Measured:
    """One pass, until everything that it hands out is complete."""

    seconds: float
    num_tokens: int
    states_bytes: int = 0
    first_at: float | None = None
    """When the first states were complete, in seconds on ``time.time()``'s clock."""


@dataclass(slots=True)
class Way:
    """A loaded way."""

    run: Callable[[Task], Measured]
    stats: Callable[[], dict[str, Any]] = dict
    """The engine's own counters."""
    close: Callable[[], None] = lambda: None
    start_phases: dict[str, float] | None = None
    """Seconds of each phase of the start, where the engine tells."""


def engine_options(start: Start) -> dict[str, Any]:
    """Keyword arguments that the embedded engine and vLLM share."""
    engine = start.engine
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": engine.dtype,
        "max_model_len": start.max_model_len,
        "max_num_batched_tokens": engine.token_budget,
        "max_num_seqs": engine.max_num_seqs,
        "enable_prefix_caching": engine.prefix_caching,
    }
    if start.device == "cuda":
        options["gpu_memory_utilization"] = MEMORY_SHARE
    return options


def file_connector(folder: str, **extra: Any) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for files in a folder, under the name that both engines know."""
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder, **extra},
    }


def embedded(start: Start) -> Way:
    """The embedded engine: with files, with ``extract_only``, or without extraction."""
    from layertap import LLM, SamplingParams

    engine = start.engine
    options = engine_options(start) | {"device": start.device}
    if engine.layers is not None:
        options["layers"] = list(engine.layers)
        options["extract_only"] = engine.extract_only
        options["kv_transfer_config"] = file_connector(start.folder)
    llm = LLM(start.model_path, **options)

    def run(task: Task) -> Measured:
        prompts = task.token_ids(start.vocab_size)
        params = SamplingParams(max_tokens=task.max_tokens, temperature=0.0, detokenize=False)
        begun = time.monotonic()
        outputs = llm.generate(prompts, params)
        if engine.layers is None:
            return Measured(time.monotonic() - begun, sum(map(len, prompts)))
        paths = [str((o.kv_transfer_params or {})["hidden_states_path"]) for o in outputs]
        return until_complete(start, prompts, paths, begun)

    return Way(run, llm.stats, llm.close, llm._core.start_phases.seconds)


def until_complete(start: Start, prompts: list[list[int]], paths: list[str], begun: float) -> Measured:
    """The end of a run that writes files: wait for them, take the time, check them, remove them.

    Args:
        begun: when the run began, on ``time.monotonic()``'s clock.
    """
    shapes = [start.shape_of(len(prompt)) for prompt in prompts]
    files.wait_complete(paths, shapes, start.itemsize)
    seconds = time.monotonic() - begun
    files.check(paths, shapes)
    size = start.itemsize * sum(t * layers * h for t, layers, h in shapes)
    measured = Measured(seconds, sum(map(len, prompts)), size, files.first_written(paths))
    files.clear(Path(start.folder))
    return measured


def memory(start: Start) -> Way:
    """``LLM.extract`` into this process's memory; each record is let go when the next one is taken."""
    from layertap import LLM, SamplingParams

    assert start.engine.layers is not None
    options = engine_options(start) | {"device": start.device, "layers": list(start.engine.layers)}
    llm = LLM(start.model_path, **options)

    def run(task: Task) -> Measured:
        prompts = task.token_ids(start.vocab_size)
        params = SamplingParams(max_tokens=task.max_tokens, temperature=0.0, detokenize=False)
        first = None
        size = 0
        begun = time.monotonic()
        records = llm.extract(prompts, tokens=task.tokens, sampling_params=params)
        for prompt, record in zip(prompts, records, strict=True):
            kept = 1 if task.tokens == "last" else len(prompt)
            assert tuple(record.hidden_states.shape) == start.shape_of(kept)
            first = first or time.time()
            size += record.hidden_states.nbytes
        seconds = time.monotonic() - begun
        return Measured(seconds, sum(map(len, prompts)), size, first)

    return Way(run, llm.stats, llm.close, llm._core.start_phases.seconds)


def transformers_batches(start: Start) -> Way:
    """transformers with ``output_hidden_states=True``: as many prompts in a batch as a step of the others has
    tokens, one file for each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from layertap.bench.worker import padded_batches

    layers = start.engine.layers
    assert layers is not None
    config = AutoConfig.from_pretrained(start.model_path)
    dtype = getattr(torch, start.engine.dtype)
    with torch.device(start.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def run(task: Task) -> Measured:
        prompts = task.token_ids(start.vocab_size)
        batch = max(1, start.engine.token_budget // max(map(len, prompts)))
        paths = [f"{start.folder}/{i}.safetensors" for i in range(len(prompts))]
        begun = time.monotonic()
        for _ in padded_batches(model, prompts, layers, paths, batch):
            pass
        return until_complete(start, prompts, paths, begun)

    return Way(run)
