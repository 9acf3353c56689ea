"""Rows out of a paged cache, whatever its layout."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from layertap.connectors import gather
from layertap.connectors.gather import CudaGather, PagedRows


def cache_of(layout: str) -> torch.Tensor:
    """[6, 4, 3, 8]; back to back, with columns before offsets (as vLLM 0.32 has them), or with gaps."""
    plain = torch.arange(6 * 4 * 3 * 8, dtype=torch.float32).view(6, 4, 3, 8)
    if layout == "columns first":
        return plain.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        padded = torch.zeros(6, 200)
        padded[:, :96] = plain.flatten(1)
        return padded[:, :96].unflatten(1, (4, 3, 8))
    return plain


@pytest.mark.parametrize("layout", ["plain", "columns first", "padded"])
@pytest.mark.parametrize("columns", [(0, 1, 2), (2,), (1, 0), (2, 2, 0)], ids=str)
def test_rows_are_picked_from_any_layout(layout: str, columns: tuple[int, ...]) -> None:
    cache = cache_of(layout)
    assert torch.equal(cache, cache_of("plain"))
    slots = torch.tensor([23, 0, 5, 5, 12])
    rows, magnitudes = PagedRows(cache).pick(slots, columns)
    assert rows.is_contiguous()
    expected = torch.stack([cache[s // 4, s % 4][list(columns)] for s in slots.tolist()])
    assert torch.equal(rows, expected)
    assert torch.equal(magnitudes.view(torch.float32), expected.abs().amax(dim=2))


def test_columns_change_between_calls() -> None:
    rows = PagedRows(cache_of("plain"))
    slots = torch.tensor([1, 2])
    assert torch.equal(rows.pick(slots, (1,))[0], rows.pick(slots, (0, 1))[0][:, 1:])
    assert torch.equal(rows.pick(slots, (2, 0))[0][:, 0], rows.pick(slots, (0, 1, 2))[0][:, 2])


def test_where_pinned_memory_is_short_nothing_is_on_its_way_to_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no page-locked memory")

    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(gather, "_to_pinned", no_memory)
    buffer = torch.zeros(3 * 8 * 4, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        CudaGather(cache_of("plain")).start(np.array([5]), (0, 1, 2), torch.float32, buffer, ())
    assert not buffer.any()
