"""vLLM's ways: without extraction, with its own connector, and with ours inside it."""

from __future__ import annotations

import time
from typing import Any

from layertap.bench.gpu.engine import Start, Task
from layertap.bench.gpu.ways import Measured, Way, engine_options, file_connector, until_complete
from layertap.vllm.arguments import prepare_cpu, speculative_config

ENVIRONMENT = {
    # flashinfer compiles its sampler at start, and is not always installed; greedy sampling does not need it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_options(start: Start) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``."""
    engine = start.engine
    options = engine_options(start) | {"model": start.model_path, "disable_log_stats": True}
    if engine.layers is None:
        return options
    options["speculative_config"] = speculative_config(engine.layers)
    if engine.way == "vllm-layertap":
        options["kv_transfer_config"] = {
            **file_connector(start.folder),
            "kv_connector": "LayertapConnector",
            "kv_connector_module_path": "layertap.vllm",
        }
    else:
        # Faster without its locks; whether a file is complete is seen from its size.
        options["kv_transfer_config"] = file_connector(start.folder, use_synchronization_lock=False)
    return options


def vllm_engine(start: Start) -> Way:
    """vLLM, loaded."""
    import vllm

    options = vllm_options(start)
    prepare_cpu(options)
    llm = vllm.LLM(**options)
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(task: Task) -> Measured:
        prompts = task.token_ids(start.vocab_size)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        begun = time.monotonic()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        if start.engine.layers is None:
            return Measured(time.monotonic() - begun, sum(map(len, prompts)))
        paths = [str(o.kv_transfer_params["hidden_states_path"]) for o in outputs]
        return until_complete(start, prompts, paths, begun)

    return Way(run)
