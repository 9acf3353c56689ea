"""What a request gives back. The fields carry vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layertap.errors import ExtractionError


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, its rank among all tokens (1 is most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or token id that ended it; None for end-of-sequence or length."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Where this sequence's hidden states are: ``hidden_states_path`` or ``hidden_states_handle``."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on ``time.monotonic()``'s clock; None for what did not happen."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    computed: float | None = None
    """All tokens computed; the states are on their way."""
    stored: float | None = None
    """The handle is readable."""


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its generated sequences and the handle of its hidden states."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    kv_transfer_params: dict[str, Any] | None = None
    """The first sequence's handle, as vLLM returns it at the top level."""
    num_cached_tokens: int = 0
    """Prompt tokens whose states came from the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: ExtractionError | None = None
    """Set when the request failed after it was admitted; nothing was published for it."""
    metrics: RequestMetrics | None = field(default=None, repr=False)


def handle_of(kv_transfer_params: Mapping[str, Any] | None) -> str | None:
    """The handle in a request's ``kv_transfer_params``: a path, or a ``memory://`` name."""
    if not kv_transfer_params:
        return None
    return kv_transfer_params.get("hidden_states_path") or kv_transfer_params.get("hidden_states_handle")
