"""What is measured: prompts, layers, dtype. Stated in full, so that anyone can repeat it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of random prompts and what is extracted from them."""

    model: str
    """Folder or hub id that ``transformers`` can read."""
    layers: tuple[int, ...]
    num_prompts: int = 96
    min_tokens: int = 16
    max_tokens: int = 900
    skew: float = 2.5
    """Lengths are ``min + (max - min) * u ** skew`` with u uniform: above 1, short prompts are more
    frequent."""
    shared_prefix: int = 0
    """Tokens that all prompts begin with."""
    dtype: str = "bfloat16"
    token_budget: int = 4096
    vocab_size: int = 49152
    seed: int = 0
    prefix_caching: bool = False
    compiled: bool = False
    """Whether the embedded engine compiles its layers on a CPU."""

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids; the same for the same workload, everywhere."""
        rng = random.Random(self.seed)
        prefix = [rng.randrange(3, self.vocab_size) for _ in range(self.shared_prefix)]
        result = []
        for _ in range(self.num_prompts):
            length = round(self.min_tokens + (self.max_tokens - self.min_tokens) * rng.random() ** self.skew)
            result.append(prefix + [rng.randrange(3, self.vocab_size) for _ in range(length)])
        return result

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def describe(self) -> str:
        """One line for people."""
        total = self.num_tokens
        shared = f", {self.shared_prefix} of them shared" if self.shared_prefix else ""
        return (
            f"{self.num_prompts} prompts of {self.shared_prefix + self.min_tokens} to "
            f"{self.shared_prefix + self.max_tokens} random tokens{shared} "
            f"(mean {total / self.num_prompts:.0f}, {total} together), "
            f"layers {','.join(map(str, self.layers))}, {self.dtype}, "
            f"{self.token_budget} tokens a step, a safetensors file for each prompt"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_tokens": self.num_tokens}

    @classmethod
    def read(cls, path: Path) -> Workload:
        values = json.loads(path.read_text())
        values.pop("num_tokens", None)
        values["layers"] = tuple(values["layers"])
        return cls(**values)
