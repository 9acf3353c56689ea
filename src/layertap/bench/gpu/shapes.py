"""The shapes of the measured models. Weights are random, so that a shape is all there is of a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen3 model by its published sizes; the names are ``config.json``'s."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    head_dim: int = 128
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    dtype: str = "bfloat16"

    def write(self, folder: Path) -> Path:
        """Make ``folder/<name>`` with a ``config.json`` that transformers and vLLM read; returns it."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "name"}
        values["torch_dtype"] = values.pop("dtype")
        values |= {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "use_cache": True,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers,
            "bos_token_id": self.vocab_size - 293,
            "eos_token_id": self.vocab_size - 291,
        }
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(values, indent=1) + "\n")
        return path

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer's matrices."""
        attention = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.hidden_size * (attention * self.head_dim + 3 * self.intermediate_size)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]

    def prefill_flops(self, spans: Iterable[tuple[int, int]], num_layers: int | None = None) -> float:
        """Floating-point operations of a prefill: two for each weight and token, and those of causal
        attention. Embedding, norms and the output head are not counted.

        Args:
            spans: for each sequence the tokens that are computed, from a position to the one after the last.
            num_layers: decoder layers that run; None: all.
        """
        attention = 2 * self.num_attention_heads * self.head_dim
        flops = 0
        for begin, end in spans:
            flops += 2 * self.layer_weights * (end - begin) + attention * (end * end - begin * begin)
        return float(flops * (self.num_hidden_layers if num_layers is None else num_layers))


QWEN3_8B = ModelShape("qwen3-8b", 4096, 36, 32, 8, 12288, tie_word_embeddings=False)
QWEN3_06B = ModelShape("qwen3-0.6b", 1024, 28, 16, 8, 3072, tie_word_embeddings=True)
