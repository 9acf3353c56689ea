"""One sequence on its way through the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from layertap.engine.hold import Hold
from layertap.errors import ExtractionError
from layertap.outputs import Logprob, RequestMetrics
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection
from layertap.token_ids import TokenArray


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    STOPPED = "stop"
    LENGTH = "length"
    ABORTED = "abort"
    ERROR = "error"

    @property
    def finished(self) -> bool:
        return self in _FINISHED


_FINISHED = (RequestStatus.STOPPED, RequestStatus.LENGTH, RequestStatus.ABORTED, RequestStatus.ERROR)


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, the tokens it has produced, and the blocks that hold its keys, values and hidden states."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    selection: Selection | None
    """What to keep of the hidden states; None when the engine taps nothing."""
    eos_token_ids: frozenset[int]
    metrics: RequestMetrics
    max_tokens: int
    """Tokens to generate at most; 0 with an engine that extracts only."""
    cache_salt: bytes = b""
    """Anything beside the token ids that changes the states; part of every block hash."""
    hold: Hold | None = None
    """Nothing of it is handed out before that is released."""

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose keys, values and hidden states lie in the cache (or will, once the launched steps have
    run)."""
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_hashed_blocks: int = 0
    """Leading blocks that the block pool knows by hash."""
    block_hashes: list[bytes] = field(default_factory=list)
    generator: torch.Generator | None = None
    stop_reason: int | str | None = None
    error: ExtractionError | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    text: str = ""
    text_offset: int = 0
    states_ready: torch.cuda.Event | None = None
    """On a GPU, recorded behind the last launched step that computes some of its states."""
    model_state: Any = None
    """The model's own cache, when it runs sequence by sequence."""
    on_output: Callable[[Request, bool], None] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.output_token_ids)

    def token_array(self, start: int, end: int) -> TokenArray:
        """Token ids of positions ``start..end`` as int64."""
        n = self.num_prompt_tokens
        if end <= n:
            return self.prompt.array[start:end]
        outputs = np.asarray(self.output_token_ids[max(0, start - n) : end - n], dtype=np.int64)
        return outputs if start >= n else np.concatenate([self.prompt.array[start:], outputs])

    def hashes(self, block_size: int) -> list[bytes]:
        """Chained hashes of the full blocks of all tokens so far; extended as tokens are appended."""
        first, full = len(self.block_hashes), self.num_tokens // block_size
        if first < full:
            tokens = self.token_array(first * block_size, full * block_size)
            data, size = tokens.tobytes(), block_size * tokens.itemsize
            parent = self.block_hashes[-1] if first else self.cache_salt
            for i in range(full - first):
                parent = xxhash.xxh3_128_digest(parent + data[i * size : (i + 1) * size])
                self.block_hashes.append(parent)
        return self.block_hashes
