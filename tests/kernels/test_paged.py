"""Triton's kernels against PyTorch's indexing: on a GPU, or with Triton and ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

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


class Launches:
    """Stands for a kernel; notes the devices that it would be launched on."""

    def __init__(self, current: list[str]) -> None:
        self.current, self.seen = current, []

    def __getitem__(self, grid: object) -> object:
        return lambda *args, **kwargs: self.seen.append(self.current[-1])


def test_kernels_are_launched_on_their_arguments_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from layertap.kernels import paged_copy, paged_gather

    current = ["another"]

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(str(tensor.device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launches = Launches(current)
    for module, kernels in (
        (paged_copy, ("_store_rows", "_store_keys_values", "_load_keys_values")),
        (paged_gather, ("_gather_rows",)),
    ):
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, launches)
    slots, cache = torch.tensor([1, 0], device=DEVICE), torch.zeros(4, 2, 8, device=DEVICE)
    paged_copy.store_rows(cache[:2, 0], cache[:, 1], slots)
    paged_copy.store_keys_values(cache[:2], cache[:2], cache, cache, slots)
    paged_copy.load_keys_values(cache, cache, slots)
    paged_gather.gather_rows(cache[None], slots, slots, 4)
    assert launches.seen == [str(cache.device)] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_on_a_device_that_is_not_the_current_one() -> None:
    from layertap.kernels.paged_copy import store_rows

    assert torch.cuda.current_device() == 0
    source, target = torch.randn(3, 64, device="cuda:1"), torch.zeros(5, 64, device="cuda:1")
    slots = torch.tensor([4, 0, 2], device="cuda:1")
    store_rows(source, target, slots)
    assert torch.equal(target[slots], source)
    rows, _ = PagedRows(target.view(1, 5, 1, 64)).pick(slots, (0,))
    assert torch.equal(rows[:, 0], source)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 9), torch.bfloat16), ((3, 8), torch.bfloat16), ((2, 8), torch.float32)],
    ids=["wide", "long", "dtype"],
)
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from layertap.kernels.paged_copy import store_keys_values, store_rows

    cache = torch.zeros(4, 1, 8, dtype=torch.bfloat16, device=DEVICE)
    slots, rows = torch.tensor([1, 0], device=DEVICE), torch.ones(shape, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match="slots"):
        store_rows(rows, cache[:, 0], slots)
    with pytest.raises(ValueError, match="slots"):
        store_keys_values(cache[:2], rows[:, None], cache, cache, slots)
    assert not cache.any()


def test_rows_of_any_strides_are_stored() -> None:
    from layertap.kernels.paged_copy import store_rows

    source, target = torch.randn(8, 2, device=DEVICE).T, torch.zeros(4, 8, device=DEVICE)
    slots = torch.tensor([3, 1], device=DEVICE)
    store_rows(source, target, slots)
    assert torch.equal(target[slots], source)


def test_heads_that_lie_far_apart() -> None:
    """As in a step of 100,000 tokens with 128 heads of 192: an offset may need more than 32 bits."""
    from layertap.kernels.paged_copy import store_keys_values

    far = 1 << 30
    keys = torch.empty(2 * far + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((2, 3, 8), (8, far, 1))
    keys.copy_(torch.randn(2, 3, 8))
    cache, values = (torch.zeros(4, 3, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    slots = torch.tensor([3, 1], device=DEVICE)
    store_keys_values(keys, keys, cache, values, slots)
    assert torch.equal(cache[slots], keys)
    assert torch.equal(values[slots], keys)
