"""Norms and outliers of one record, computed in a few megabytes whatever its size.

Shapes: T kept tokens, n rows of a chunk, L layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layertap.layers import LayerId
from layertap.record import HiddenStates

_CHUNK_VALUES = 4 << 20


@dataclass(frozen=True, slots=True)
class Outlier:
    """The value of largest magnitude in a record."""

    value: float
    layer_id: LayerId | None
    """None where the file does not say which layers it holds; ``column`` is known always."""
    column: int
    position: int
    """In the sequence, not in the file."""
    dimension: int


@dataclass(frozen=True, slots=True)
class RecordStatistics:
    """What ``layertap inspect`` shows of one record."""

    norms: torch.Tensor
    """[T, L] float32: Euclidean norms of the states"""
    outlier: Outlier

    @property
    def mean_norms(self) -> list[float]:
        """[L] means over the tokens."""
        return [float(x) for x in self.norms.double().mean(0)]


def record_statistics(record: HiddenStates) -> RecordStatistics:
    """Norms of all states, and the largest magnitude with its place.

    Raises:
        ValueError: the record holds no states.
    """
    t, n_layers, hidden_size = record.hidden_states.shape
    if 0 in (t, n_layers, hidden_size):
        raise ValueError(f"no states in it: its shape is {(t, n_layers, hidden_size)}")
    rows = max(1, _CHUNK_VALUES // (n_layers * hidden_size))
    norms = torch.empty(t, n_layers)
    largest, where, value = -1.0, (0, 0, 0), 0.0
    for start in range(0, t, rows):
        chunk_nLH = record.hidden_states[start : start + rows].float()
        if record.scales is not None:
            chunk_nLH = chunk_nLH * record.scales[start : start + rows]
        norms[start : start + rows] = chunk_nLH.norm(dim=-1)
        flat = chunk_nLH.reshape(-1)
        index = int(flat.abs().argmax())
        if abs(float(flat[index])) > largest:
            value = float(flat[index])
            largest = abs(value)
            row, rest = divmod(index, n_layers * hidden_size)
            where = (start + row, *divmod(rest, hidden_size))
    row, column, dimension = where
    position = record.positions[row] if record.positions is not None else row
    layer_id = record.layer_ids[column] if record.layer_ids else None
    return RecordStatistics(norms, Outlier(value, layer_id, column, position, dimension))
