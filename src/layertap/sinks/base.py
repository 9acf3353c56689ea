"""What a sink is: the place where one request's hidden states go, chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """Everything that is known of a record before its first chunk is written."""

    request_id: str
    token_ids: torch.Tensor
    """[T] int64 on the CPU: the kept tokens, in output order."""
    shape: tuple[int, int, int]
    """(T, L, H) of ``hidden_states``."""
    dtype: torch.dtype
    """Storage dtype of ``hidden_states``."""
    has_scales: bool = False
    """True for float8 storage: ``hidden_states_scales`` [T, 1, 1] float32 comes along with each chunk."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Strings for the header: see :mod:`layertap.record`."""


@dataclass(frozen=True, slots=True)
class WholeRecord:
    """A record that is complete in memory, which stays the caller's."""

    spec: RecordSpec
    hidden: torch.Tensor
    """[T, L, H], contiguous."""
    scales: torch.Tensor | None = None
    """[T, 1, 1] float32."""


class RecordWriter(ABC):
    """Takes one request's rows in order. Used by one thread at a time."""

    @abstractmethod
    def write(self, hidden_TLH: torch.Tensor, scales_T11: torch.Tensor | None = None) -> None:
        """Append rows. The tensor is CPU memory that the caller reuses as soon as this returns."""

    def keep(self, hidden_TLH: torch.Tensor, scales_T11: torch.Tensor | None = None) -> None:
        """The same with a whole record, whose memory is the writer's from then on."""
        self.write(hidden_TLH, scales_T11)

    @abstractmethod
    def commit(self) -> str:
        """Publish the whole record, at once, and return its handle."""

    @abstractmethod
    def abort(self) -> None:
        """Drop everything that was written. Nothing stays visible. May be called after a failed ``write`` or
        ``commit``."""


class Sink(ABC):
    """Opens a writer for each request. Safe to call from several threads."""

    keeps_rows: ClassVar[bool] = False
    """Records stay in memory: many small ones are copied out of a staging buffer in one call, and given to
    :meth:`RecordWriter.keep`."""

    @property
    def publishes_together(self) -> bool:
        """:meth:`publish` takes records that are whole, which is better than one writer after another."""
        return False

    @abstractmethod
    def open(self, spec: RecordSpec) -> RecordWriter: ...

    def publish(self, records: Sequence[WholeRecord]) -> list[str | Exception]:
        """Publish whole records; for each its handle, or why nothing of it was published."""
        raise NotImplementedError

    @abstractmethod
    def handle(self, request_id: str) -> str:
        """The handle that :meth:`RecordWriter.commit` will return for this request."""

    def close(self) -> None:  # noqa: B027 - most sinks hold nothing
        """Release threads, connections and memory. Published records stay."""
