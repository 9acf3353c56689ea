"""The rows of the ``gpu`` suite as data: workload, ways, and the ratio that is to be reached."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from layertap.bench.gpu.shapes import QWEN3_06B, QWEN3_8B, ModelShape
from layertap.config import nearest
from layertap.errors import InvalidInputError

WAYS = {
    "layertap": "layertap",
    "layertap-no-extraction": "layertap, no extraction",
    "layertap-memory": "layertap, memory sink",
    "layertap-extract-only": "layertap, extract_only",
    "layertap-server": "layertap serve, 64 clients",
    "transformers": "transformers, padded batches",
    "vllm-no-extraction": "vLLM, no extraction",
    "vllm-connector": "vLLM, its connector",
    "vllm-layertap": "vLLM, our connector",
}
"""Every way that can be measured, with its title."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts; the same for the same values, everywhere."""

    count: int
    length: int
    """Tokens of each; with ``sigma`` their median."""
    sigma: float = 0.0
    """Above 0, lengths are log-normal with this standard deviation of the logarithm."""
    longest: int | None = None
    """Longer ones are cut; with ``sigma``."""
    shared_prefix: int = 0
    """Tokens, of ``length``, that all begin with."""
    fresh: bool = False
    """New tokens in every run, so that no cache knows them from the run before."""
    seed: int = 0

    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        if not self.sigma:
            return [self.length] * self.count
        rng = random.Random(self.seed)
        drawn = (round(self.length * rng.lognormvariate(0.0, self.sigma)) for _ in range(self.count))
        return [max(1, min(n, self.longest or n)) for n in drawn]

    def token_ids(self, vocab_size: int, run: int = 0) -> list[list[int]]:
        """The prompts of one run."""
        rng = random.Random(self.seed + 1 + (run if self.fresh else 0))
        # The first ids and the last ones are left out: there special tokens may be.
        ids = range(10, vocab_size - min(300, vocab_size // 4))
        prefix = rng.choices(ids, k=self.shared_prefix)
        return [prefix + rng.choices(ids, k=n - self.shared_prefix) for n in self.lengths()]

    def spans(self) -> list[tuple[int, int]]:
        """For each prompt the tokens that have to be computed: what is shared, only once."""
        lengths = self.lengths()
        return [(0 if i == 0 else self.shared_prefix, n) for i, n in enumerate(lengths)]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths())

    def describe(self) -> str:
        """A few words for people."""
        if self.sigma:
            return f"{self.count} log-normal around {self.length}, up to {self.longest}"
        if self.shared_prefix:
            return f"{self.count} x ({self.shared_prefix} shared + {self.length - self.shared_prefix})"
        return f"{self.count:,} x {self.length:,}"


@dataclass(frozen=True, slots=True)
class Required:
    """A ratio that is to be reached: of tokens/s, at least; in a row that measures starts, of seconds, at
    most."""

    way: str
    against: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    letter: str
    shape: ModelShape
    layers: tuple[int, ...] | Literal["all"]
    prompts: Prompts
    required: tuple[Required, ...]
    measure: Literal["rate", "start"] = "rate"
    """Tokens/s of whole runs, or seconds from the start of the process to the first file."""
    tokens: Literal["all", "last"] = "all"
    """Whose states the embedded engine's memory sink keeps."""
    max_tokens: int = 1
    """Tokens that the embedded engine generates for a prompt; vLLM's ways always generate one."""
    prefix_caching: bool = False
    optional: tuple[str, ...] = ()
    """Ways beside those of ``required``, measured where they are asked for."""
    token_budget: int = 16384
    """Tokens a step, in every way."""
    max_num_seqs: int = 512
    note: str = ""

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways that the ratios need, the engine's own first, each once."""
        needed = [r for r in self.required if r.way not in self.optional and r.against not in self.optional]
        return tuple(dict.fromkeys([r.way for r in needed] + [r.against for r in needed]))

    @property
    def layer_ids(self) -> tuple[int, ...]:
        if self.layers == "all":
            return tuple(range(self.shape.num_hidden_layers + 1))
        return self.layers

    def layers_of(self, way: str) -> tuple[int, ...] | None:
        """The layers that a way extracts; None if it extracts none."""
        return None if way.endswith("no-extraction") else self.layer_ids

    def flops(self, way: str) -> float:
        """Operations that a way needs for the prompts (see :meth:`ModelShape.prefill_flops`)."""
        layers = max(self.layer_ids) if way == "layertap-extract-only" else None
        spans = self.prompts.spans() if self.prefix_caching else [(0, n) for n in self.prompts.lengths()]
        return self.shape.prefill_flops(spans, layers)

    def states_bytes(self, way: str) -> int:
        """Bytes of the states that a way hands out."""
        layers = self.layers_of(way)
        if layers is None:
            return 0
        kept = self.prompts.count if self.keeps_last(way) else self.prompts.num_tokens
        return kept * len(layers) * self.shape.hidden_size * self.shape.itemsize

    def keeps_last(self, way: str) -> bool:
        """Whether a way keeps the last token's states alone: only the embedded engine can choose."""
        return self.tokens == "last" and way == "layertap-memory"

    def describe(self) -> str:
        layers = f"all {len(self.layer_ids)}" if self.layers == "all" else ",".join(map(str, self.layers))
        last = ", last token" if self.tokens == "last" else ""
        cached = ", prefix caching" if self.prefix_caching else ""
        start = ": start to first file" if self.measure == "start" else ""
        return f"{self.shape.name}, layers {layers}, {self.prompts.describe()}{last}{cached}{start}"

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {**values, "num_tokens": self.prompts.num_tokens, "describe": self.describe()}


_A_LAYERS = (3, 18, 33, 36)
_B_LAYERS = (3, 14, 25, 28)
_A_PROMPTS = Prompts(128, 2048)
_SERVED = Prompts(512, 1024)
_INSIDE_VLLM = ("transformers", "vllm-layertap")
_LAST = "vLLM's connector cannot choose tokens: it stores every token's states, in files"

ROWS: dict[str, Row] = {
    row.letter: row
    for row in (
        Row(
            "A", QWEN3_8B, _A_LAYERS, _A_PROMPTS,
            (
                Required("layertap", "vllm-no-extraction", 1.00),
                Required("layertap", "vllm-connector", 1.04),
                Required("vllm-layertap", "vllm-connector", 1.00),
            ),
            optional=_INSIDE_VLLM,
        ),
        Row(
            "B", QWEN3_06B, _B_LAYERS, Prompts(512, 1024),
            (
                Required("layertap", "vllm-connector", 1.90),
                Required("layertap", "vllm-no-extraction", 1.00),
                Required("vllm-layertap", "vllm-connector", 1.40),
            ),
            optional=_INSIDE_VLLM,
        ),
        Row(
            "C", QWEN3_8B, "all", Prompts(64, 2048),
            (Required("layertap-memory", "layertap-no-extraction", 0.90),),
        ),
        Row(
            "D", QWEN3_8B, (2, 18), _A_PROMPTS,
            (Required("layertap-extract-only", "vllm-connector", 1.90),),
            max_tokens=0,
            note="extract_only runs the layers below the highest one that is tapped",
        ),
        Row(
            "E", QWEN3_8B, _A_LAYERS, Prompts(512, 800, sigma=0.8, longest=8192),
            (Required("layertap", "vllm-connector", 1.05),),
        ),
        Row(
            "F", QWEN3_8B, _A_LAYERS, Prompts(256, 1152, shared_prefix=1024, fresh=True),
            (Required("layertap", "vllm-connector", 1.05),),
            prefix_caching=True,
            note="tokens/s count all tokens, those found in the cache too; MFU counts what is computed",
        ),
        Row(
            "G", QWEN3_8B, _A_LAYERS, Prompts(4, 32768),
            (Required("layertap", "vllm-connector", 1.00),),
        ),
        Row(
            "H", QWEN3_8B, _A_LAYERS, _A_PROMPTS,
            (Required("layertap", "vllm-connector", 0.25),),
            measure="start",
            note="the first start finds empty compilation caches, the second one those of the first",
        ),
        Row(
            "I", QWEN3_8B, _A_LAYERS, _SERVED,
            (Required("layertap-server", "layertap", 0.95),),
        ),
        Row(
            "J", QWEN3_06B, _B_LAYERS, _SERVED,
            (Required("layertap-server", "layertap", 0.80),),
        ),
        Row(
            "K", QWEN3_06B, _B_LAYERS, Prompts(16384, 64),
            (Required("layertap-memory", "vllm-connector", 2.50),),
            tokens="last",
            max_tokens=0,
            note=_LAST,
        ),
    )
}  # fmt: skip


def choose_rows(text: str | None) -> list[Row]:
    """The rows that ``--rows A,B`` names; None means all.

    Raises:
        InvalidInputError: an unknown row, or none at all.
    """
    if text is None:
        return list(ROWS.values())
    letters = [word.strip().upper() for word in text.split(",") if word.strip()]
    if not letters:
        raise InvalidInputError("--rows", text, f"letters of {', '.join(ROWS)}")
    for letter in letters:
        if letter not in ROWS:
            raise InvalidInputError("--rows", letter, f"one of {', '.join(ROWS)}")
    return [ROWS[letter] for letter in dict.fromkeys(letters)]


def choose_ways(text: str | None, rows: Sequence[Row]) -> tuple[str, ...] | None:
    """The ways that ``--peers`` names; None leaves them to each row.

    Raises:
        InvalidInputError: an unknown way, or one that none of the rows has.
    """
    if text is None:
        return None
    known = {way for row in rows for way in (*row.ways, *row.optional)}
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names or (text,):
        if name not in known:
            raise InvalidInputError("--peers", name, nearest(name, known))
    return names


def scaled_down(row: Row, most_prompts: int = 4) -> Row:
    """The same row with a tiny model and a few short prompts: for a machine without a GPU, whose figures mean
    nothing."""
    total = row.shape.num_hidden_layers
    shape = ModelShape(
        f"tiny-{row.shape.name}", 64, 4, 4, 2, 96, row.shape.tie_word_embeddings,
        head_dim=32, vocab_size=512, max_position_embeddings=512, dtype="float32",
    )  # fmt: skip
    scaled = tuple(dict.fromkeys(round(k * 4 / total) for k in row.layer_ids))
    prompts = row.prompts
    length = min(prompts.length, 48)
    prompts = dataclasses.replace(
        prompts,
        count=min(prompts.count, most_prompts),
        length=length,
        longest=None if prompts.longest is None else 64,
        shared_prefix=length // 3 * 2 if prompts.shared_prefix else 0,
    )
    return dataclasses.replace(
        row,
        shape=shape,
        layers="all" if row.layers == "all" else scaled,
        prompts=prompts,
        token_budget=64,
        max_num_seqs=8,
    )
