"""Rows out of a paged cache, whatever its layout."""

from __future__ import annotations

import pytest
import torch

from layertap.connectors.gather import PagedRows


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
