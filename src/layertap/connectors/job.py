"""What a producer is asked to do, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from layertap.errors import ExtractionError
from layertap.selection import Selection
from layertap.token_ids import TokenArray


@dataclass(frozen=True, slots=True)
class Job:
    """One ended request, whose states lie in the cache."""

    request_id: str
    token_ids: Sequence[int] | TokenArray
    """Prompt, and then the output tokens if there are any."""
    num_tokens: int
    """Leading tokens with valid states. Those past the prompt are kept only if the selection says so."""
    num_prompt_tokens: int
    block_ids: Sequence[int]
    """Token i lies in block ``block_ids[i // block_size]``."""
    selection: Selection
    ready: Any = None
    """On a GPU, the event after which the states are valid; None: once the work queued on the current stream
    when the job is submitted is done."""

    @property
    def num_states(self) -> int:
        """Length of the sequence that the selection's positions refer to."""
        if self.selection.include_output_tokens:
            return self.num_tokens
        return min(self.num_tokens, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Completion:
    """News of a job. ``copied`` comes once, before ``completed``, also after a failure or a cancellation."""

    kind: Literal["copied", "completed"]
    """``copied``: nothing reads the job's blocks any more. ``completed``: it is published or has failed."""
    request_id: str
    handle: str | None = None
    """Of the published record (``completed`` only)."""
    error: ExtractionError | None = None
    """Why nothing was published (``completed`` only)."""
