"""What one measured process is started with, and what it is asked to do: plain values, sent as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from layertap.bench.gpu.rows import Prompts, Row

CLIENTS = 64
_LEAST_MODEL_LEN = 4096
_MARGIN = 16
MEMORY_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Engine:
    """One way with its engine's settings. Rows whose settings are equal are measured in one process."""

    way: str
    model: str
    """Name of the shape."""
    layers: tuple[int, ...] | None
    dtype: str
    token_budget: int
    max_num_seqs: int
    prefix_caching: bool
    extract_only: bool

    @classmethod
    def of(cls, row: Row, way: str) -> Engine:
        return cls(
            way,
            row.shape.name,
            row.layers_of(way),
            row.shape.dtype,
            row.token_budget,
            row.max_num_seqs,
            row.prefix_caching,
            way == "layertap-extract-only",
        )

    @property
    def uses_vllm(self) -> bool:
        return self.way.startswith("vllm")


@dataclass(frozen=True, slots=True)
class Start:
    """The first thing that a measured process reads."""

    engine: Engine
    model_path: str
    max_model_len: int
    folder: str
    """For files; there, and empty."""
    hidden_size: int
    itemsize: int
    vocab_size: int
    device: str
    """``cuda`` or ``cpu``."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Start:
        engine = dict(values["engine"])
        engine["layers"] = None if engine["layers"] is None else tuple(engine["layers"])
        return cls(**{**values, "engine": Engine(**engine)})

    def shape_of(self, num_tokens: int) -> tuple[int, int, int]:
        """[T, L, H] of a record of ``num_tokens`` tokens."""
        assert self.engine.layers is not None
        return num_tokens, len(self.engine.layers), self.hidden_size


@dataclass(frozen=True, slots=True)
class Task:
    """One pass over a row's prompts."""

    prompts: Prompts
    run: int
    """Which run it is; 0 is the warm-up."""
    tokens: str
    max_tokens: int
    most_tokens: int | None = None
    """Only the first prompts, up to so many tokens: a warm-up."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Task:
        return cls(**{**values, "prompts": Prompts(**values["prompts"])})

    def token_ids(self, vocab_size: int) -> list[list[int]]:
        """The prompts to run."""
        everything = self.prompts.token_ids(vocab_size, self.run)
        if self.most_tokens is None:
            return everything
        chosen: list[list[int]] = []
        total = 0
        for prompt in everything:
            chosen.append(prompt)
            total += len(prompt)
            if total >= self.most_tokens:
                break
        return chosen


def max_model_len(rows: list[Row]) -> int:
    """The longest sequence that an engine has to take for these rows; the model's own limit at most."""
    longest = max(max(row.prompts.lengths()) for row in rows) + _MARGIN
    return min(max(longest, _LEAST_MODEL_LEN), rows[0].shape.max_position_embeddings)
