"""The engine's configuration as command-line flags: each field of ``EngineConfig`` once, with its help, and
those of vLLM's that large models need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from layertap.config import check_engine_name
from layertap.engine_defaults import default_of
from layertap.errors import InvalidInputError
from layertap.sizes import ENGINE_SIZES, parse_flags

_PANEL = "Engine (defaults of the torch engine; vLLM has its own)"


def _option(help_text: str, **kwargs: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=_PANEL, show_default=False, **kwargs)


def _field(name: str, help_text: str, **kwargs: Any) -> Any:
    """A flag for a field of ``EngineConfig``, whose help ends with its default."""
    return _option(f"{help_text}; default: {default_of(name)}.", **kwargs)


_COUNT = {"min": 1, "metavar": "N"}
_SIZE = {"metavar": "SIZE"}
# A default of None leaves the field to EngineConfig's own default.
ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": Annotated[
        str | None,
        _field("dtype", "Of weights and activations: auto, float32, bfloat16, float16", metavar="DTYPE"),
    ],
    "device": Annotated[str | None, _field("device", "auto, cpu, cuda or cuda:1", metavar="DEVICE")],
    "max_model_len": Annotated[
        str | None,
        _field(
            "max_model_len", "Longest sequence, prompt and output together (1k = 1000, 1K = 1024)", **_SIZE
        ),
    ],
    "max_num_batched_tokens": Annotated[
        str | None, _field("max_num_batched_tokens", "Tokens computed in one step", **_SIZE)
    ],
    "max_num_seqs": Annotated[int | None, _field("max_num_seqs", "Sequences in flight at once", **_COUNT)],
    "block_size": Annotated[int | None, _field("block_size", "Tokens in one cache block", **_COUNT)],
    "enable_prefix_caching": Annotated[
        bool | None,
        _field("enable_prefix_caching", "Compute beginnings that prompts share only once"),
    ],
    "kv_cache_memory_bytes": Annotated[
        str | None,
        _field("kv_cache_memory_bytes", "Memory of all caches together, in bytes, such as 8GiB", **_SIZE),
    ],
    "gpu_memory_utilization": Annotated[
        float | None,
        _field("gpu_memory_utilization", "Share of the GPU's memory to use", metavar="SHARE"),
    ],
    "enforce_eager": Annotated[
        bool | None,
        _field(
            "enforce_eager",
            "Compile nothing: slower, but starts at once (--no-enforce-eager compiles on a CPU, too)",
        ),
    ],
    "extract_only": Annotated[
        bool | None,
        _option("Run only the layers up to the highest tapped one; default: on if nothing is generated."),
    ],
    "tokenizer": Annotated[
        str | None, _field("tokenizer", "Folder or id to take the tokenizer from", metavar="MODEL")
    ],
    "skip_tokenizer_init": Annotated[
        bool | None, _field("skip_tokenizer_init", "Load no tokenizer: prompts are token ids")
    ],
    "trust_remote_code": Annotated[
        bool | None, _field("trust_remote_code", "Run model code that comes with a checkpoint")
    ],
    "revision": Annotated[
        str | None, _field("revision", "Branch, tag or commit on the hub", metavar="REVISION")
    ],
    "load_format": Annotated[
        str | None,
        _field("load_format", "auto, safetensors, gguf, or dummy (random weights)", metavar="FORMAT"),
    ],
    "seed": Annotated[int | None, _field("seed", "Of dummy weights and of sampling", metavar="N")],
    "self_check": Annotated[
        bool | None, _field("self_check", "Compare with the model's plain forward at start")
    ],
    "tensor_parallel_size": Annotated[
        int | None,
        _field(
            "tensor_parallel_size",
            "GPUs that share one model (only the vllm engine goes above 1)",
            **_COUNT,
        ),
    ],
    "data_parallel_size": Annotated[
        int | None,
        _field("data_parallel_size", "Replicas of the model (only layertap serve goes above 1)", **_COUNT),
    ],
    "disable_log_stats": Annotated[bool | None, typer.Option(hidden=True)],
}

VLLM_OPTIONS: dict[str, Any] = {
    "pipeline_parallel_size": Annotated[
        int | None, _option("GPUs that share the layers (only the vllm engine); default: 1.", **_COUNT)
    ],
    "enable_expert_parallel": Annotated[
        bool | None, _option("Experts on different GPUs (only the vllm engine); default: off.")
    ],
    "quantization": Annotated[
        str | None,
        _option(
            "Of the weights, such as fp8 or awq (only the vllm engine); default: what the checkpoint says.",
            metavar="METHOD",
        ),
    ],
}
TORCH_ONLY = ("device", "extract_only", "self_check")  # fields of EngineConfig that vLLM does not have


def check_engine(engine: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown engine, and flags that only the other one knows.

    Raises:
        InvalidInputError: naming the flag.
    """
    check_engine_name(engine, "--engine")
    other = "torch" if engine == "vllm" else "vllm"
    for name in TORCH_ONLY if engine == "vllm" else VLLM_OPTIONS:
        if name in options:
            flag = "--" + name.replace("_", "-")
            raise InvalidInputError(
                flag, options[name], f"nothing with --engine {engine}: only --engine {other} knows it"
            )


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose last parameter is ``**options``, a flag for each field of ``EngineConfig``, and
    those of ``VLLM_OPTIONS``.

    It gets only those that the user set.

    Raises:
        InvalidInputError: from the command, for a size of the wrong form.
    """
    options = {**ENGINE_OPTIONS, **VLLM_OPTIONS}
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]

    def wrapped(**kwargs: Any) -> None:
        engine = {name: value for name in options if (value := kwargs.pop(name)) is not None}
        parse_flags(engine, ENGINE_SIZES)
        command(**kwargs, **engine)

    wrapped.__doc__ = command.__doc__
    wrapped.__name__ = command.__name__
    wrapped.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return wrapped
