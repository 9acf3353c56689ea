"""What the torch engine does where a field of its configuration is not set, in words, for pages of help."""

from __future__ import annotations

from dataclasses import fields

from layertap.config import EngineConfig

# A test holds these against the engine, which is not imported here: a page of help is not to wait for torch.
_IN_WORDS = {
    "tokenizer": "the model's",
    "dtype": "auto, the checkpoint's",
    "max_model_len": "the model's own limit (8192 if it states none), or less if the cache holds less",
    "max_num_batched_tokens": "4096 on a CPU, 16384 on a GPU",
    "kv_cache_memory_bytes": "on a GPU what --gpu-memory-utilization leaves beside the model and a step, "
    "on a CPU a tenth of the memory, at most 2 GiB",
    "revision": "the hub's main branch",
    "enforce_eager": "layers are compiled on a GPU, not on a CPU",
    "device": "auto, the first GPU if there is one, else the CPU",
}


def default_of(name: str) -> str:
    """The default of a field of :class:`~layertap.config.EngineConfig`: ``"256"``, ``"on"``, or a phrase.

    Raises:
        KeyError: there is no such field, or it has no default.
    """
    if name in _IN_WORDS:
        return _IN_WORDS[name]
    value = {f.name: f.default for f in fields(EngineConfig) if f.name not in ("model", "layers")}[name]
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
