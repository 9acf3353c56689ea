"""Triton's kernels against PyTorch's indexing: on a GPU, or with Triton and ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from layertap.connectors.gather import PagedRows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not INTERPRETED,
        reason="needs a CUDA device, or Triton's interpreter",
    ),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("hidden_size", [16, 200, 4500])
def test_gathered_rows_and_magnitudes(dtype: torch.dtype, columns_first: bool, hidden_size: int) -> None:
    from layertap.kernels.paged_gather import gather_rows

    cache = torch.randn(9, 4, 3, hidden_size).to(dtype)
    cache[2, 1, 2, 7] = float("nan")
    cache[3, 0, 0, 1] = float("-inf")
    cache[4] = 0
    if columns_first:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    slots = torch.tensor([9, 12, 16, 0, 35, 9, 20])
    columns = (2, 0, 2)
    rows, magnitudes = gather_rows(
        cache.to(DEVICE), slots.to(DEVICE), torch.tensor(columns, device=DEVICE), block_size=4
    )
    expected_rows, expected = PagedRows(cache).pick(slots, columns)
    assert torch.equal(rows.cpu().view(torch.uint8), expected_rows.view(torch.uint8))
    assert torch.equal(magnitudes.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 5000])
def test_stored_rows(dtype: torch.dtype, width: int) -> None:
    from layertap.kernels.paged_copy import store_rows

    source = torch.randn(6, 3, width, device=DEVICE).to(dtype)[:, 1]
    target = torch.zeros(20, 2, width, dtype=dtype, device=DEVICE)
    slots = torch.tensor([19, 0, 7, 3, 11, 4], device=DEVICE)
    store_rows(source, target[:, 1], slots)
    assert torch.equal(target[slots, 1], source)
    assert int(target.any(dim=2).sum()) == 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (24, 16), (80, 80)])
def test_stored_keys_and_values(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    from layertap.kernels.paged_copy import load_keys_values, store_keys_values

    keys = torch.randn(3, 6, key_dim, device=DEVICE).to(dtype).transpose(0, 1)
    values = torch.randn(6, 3, value_dim, device=DEVICE).to(dtype)
    key_cache = torch.zeros(20, 3, key_dim, dtype=dtype, device=DEVICE)
    value_cache = torch.zeros(20, 3, value_dim, dtype=dtype, device=DEVICE)
    slots = torch.tensor([19, 0, 7, 3, 11, 4], device=DEVICE)
    store_keys_values(keys, values, key_cache, value_cache, slots)
    assert torch.equal(key_cache[slots], keys)
    assert torch.equal(value_cache[slots], values)
    assert int(key_cache.any(dim=2).any(dim=1).sum()) == 6
    assert int(value_cache.any(dim=2).any(dim=1).sum()) == 6
    again = torch.tensor([3, 0, 19, 3], device=DEVICE)
    got_keys, got_values = load_keys_values(key_cache, value_cache, again)
    assert torch.equal(got_keys, key_cache[again])
    assert torch.equal(got_values, value_cache[again])
