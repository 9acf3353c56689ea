"""Typed configuration of an engine: every field documented, everything checked once, here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from layertap.errors import InvalidInputError
from layertap.layers import LayerSpec

SPECULATIVE_LAYERS = "speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids"
DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")


ENGINES = ("torch", "vllm")
_MOST_LISTED = 60


def check_engine_name(engine: str, field: str = "engine") -> None:
    """Raises:
    InvalidInputError: there is no such engine.
    """
    if engine not in ENGINES:
        raise InvalidInputError(field, engine, " or ".join(map(repr, ENGINES)))


def nearest(word: str, known: Iterable[str]) -> str:
    """A phrase for error messages: the known names (of very many, the nearest), and the one that was probably
    meant."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if len(names) > _MOST_LISTED:
        some = difflib.get_close_matches(word, names, n=8, cutoff=0.0)
        return f"{hint}one of {len(names)} names, such as {', '.join(some)}"
    return f"{hint}one of {', '.join(names)}"


def check_names(given: Mapping[str, Any], known: Iterable[str], prefix: str = "", else_: str = "") -> None:
    """Refuse a key that is not known.

    Args:
        prefix: of the field in the message: ``"speculative_config."``.
        else_: what is allowed beside the known names, as the end of a phrase.

    Raises:
        InvalidInputError: naming it, its value and the nearest known one.
    """
    names = set(known)
    for key in given:
        if key not in names:
            raise InvalidInputError(f"{prefix}{key}", given[key], nearest(str(key), names) + else_)


@dataclass(slots=True)
class EngineConfig:
    """Configuration of the embedded engine. Names are vLLM's where vLLM has the same thing."""

    model: str
    """Hugging Face id, local folder, ``.gguf`` file, or ``smollm2``."""
    tokenizer: str | None = None
    """Where the tokenizer comes from; None takes it from the model."""
    layers: LayerSpec | None = None
    """Boundaries to tap (see :mod:`layertap.layers`); None taps nothing."""
    dtype: str = "auto"
    """Of weights and activations; ``auto`` takes the checkpoint's."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together. None: the model's own limit, or what fits into the
    cache."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step. None: 4096 on a CPU, 16384 on a GPU."""
    max_num_seqs: int = 256
    """Sequences in flight at once."""
    block_size: int = 16
    """Tokens in one cache block."""
    enable_prefix_caching: bool = True
    """Reuse the blocks of prompts that begin alike."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache and the hidden-state cache together. None: on a GPU what
    ``gpu_memory_utilization`` leaves after the model and a profiling step, on a CPU a tenth of the machine's
    memory, at most 2 GiB."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the engine may use."""
    seed: int = 0
    """Seeds dummy weights and the sampling of requests that bring no seed."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    enforce_eager: bool | None = None
    """True compiles nothing: slower, but starts at once. None compiles the decoder layers on a GPU only,
    False on a CPU, too."""
    load_format: str = "auto"
    """``auto`` reads the weights; ``dummy`` draws them at random from ``seed`` (for benchmarks)."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer; prompts are then token ids."""
    tensor_parallel_size: int = 1
    """Only ``engine="vllm"`` goes above 1."""
    data_parallel_size: int = 1
    """Replicas; ``layertap serve`` starts them."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: the first GPU if there is one."""
    extract_only: bool = False
    """Generate nothing: only the decoder layers up to the highest tapped one are loaded and run."""
    disable_log_stats: bool = True
    """Accepted for vLLM's sake; statistics are read through ``LLM.stats()``."""
    self_check: bool = True
    """Compare the batched path with the model's own plain forward on a few tokens at start."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidInputError(
                "model", self.model, "a Hugging Face id, a local folder, a .gguf file or 'smollm2'"
            )
        self.dtype = str(self.dtype).removeprefix("torch.")
        if self.dtype not in DTYPES:
            raise InvalidInputError("dtype", self.dtype, ", ".join(DTYPES))
        self.dtype = {"half": "float16", "float": "float32"}.get(self.dtype, self.dtype)
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                self._positive_int(name)
        for name in ("max_num_seqs", "block_size", "tensor_parallel_size", "data_parallel_size"):
            self._positive_int(name)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInputError("seed", self.seed, "an integer")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidInputError(
                "gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1"
            )
        if self.load_format not in ("auto", "dummy", "safetensors", "gguf"):
            raise InvalidInputError("load_format", self.load_format, "auto, safetensors, gguf or dummy")
        if self.tensor_parallel_size != 1:
            raise InvalidInputError(
                "tensor_parallel_size",
                self.tensor_parallel_size,
                "1 with engine='torch'; use engine='vllm' for more",
            )
        if self.extract_only and self.layers is None:
            raise InvalidInputError("extract_only", True, "only together with layers")

    def _positive_int(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInputError(name, value, "an integer from 1 up")

    @classmethod
    def from_kwargs(cls, model: str, kwargs: Mapping[str, Any]) -> EngineConfig:
        """Build from keyword arguments; an unknown one is refused with the nearest known name."""
        known = {f.name for f in fields(cls)} - {"model"}
        check_names(kwargs, known, else_="; engine='vllm' takes vLLM's own")
        return cls(model, **kwargs)


def layers_of_speculative_config(config: Mapping[str, Any]) -> list[int | str]:
    """The tapped layers in vLLM's ``speculative_config``.

    Raises:
        InvalidInputError: another method, or no
        ``draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids``.
    """
    name = "speculative_config"
    if not isinstance(config, Mapping):
        raise InvalidInputError(
            name, config, "an object with method, num_speculative_tokens and draft_model_config"
        )
    check_names(config, ("method", "num_speculative_tokens", "draft_model_config"), f"{name}.")
    if config.get("method") != "extract_hidden_states":
        raise InvalidInputError(f"{name}.method", config.get("method"), "'extract_hidden_states'")
    if config.get("num_speculative_tokens", 1) != 1:
        raise InvalidInputError(f"{name}.num_speculative_tokens", config["num_speculative_tokens"], "1")
    hf_config = (config.get("draft_model_config") or {}).get("hf_config") or {}
    ids = hf_config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list | tuple) or not ids:
        raise InvalidInputError(SPECULATIVE_LAYERS, ids, "a non-empty list of layer ids")
    return list(ids)
