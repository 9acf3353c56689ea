"""Products with specialized warps against PyTorch's in float32, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.comparisons import assert_sum_and_squares, off_by

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
DTYPES = [torch.float16, torch.bfloat16]
SIZES = [(1, 64, 128), (130, 72, 384), (300, 136, 256), (65, 264, 640), (1000, 1024, 512), (9000, 328, 1152)]
"""Tokens, depth, columns: with parts of a tile at every edge, one step and more, tiles in turns."""


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_product_plus(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    from layertap.kernels.specialized_product import product_plus

    x, residual = random(rows, depth, dtype=dtype), random(rows, columns, dtype=dtype)
    weight = random(columns, depth, dtype=dtype, scale=0.1)
    assert_sum_and_squares(product_plus, x, weight, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_rotated_product(
    dtype: torch.dtype, size: int, with_norm: bool, with_scale: bool, rows: int, depth: int, columns: int
) -> None:
    from layertap.kernels.specialized_product import rotated_product

    x, weight = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype, scale=0.1)
    scale = torch.rand(rows, device="cuda") + 0.1 if with_scale else None
    norm = random(size, dtype=dtype) if with_norm else None
    cos, sin = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype)
    got = rotated_product(x, weight, scale, norm, cos, sin, 1e-6)
    heads = F.linear(x.float(), weight.float())
    if scale is not None:
        heads = heads * scale[:, None]
    heads = heads.view(rows, -1, size)
    if norm is not None:
        heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.float()
    a, b = heads.chunk(2, -1)
    rotated = torch.cat((-b, a), -1)
    expected = heads * cos.float()[:, None] + rotated * sin.float()[:, None]
    assert got.shape == (rows, columns)
    assert off_by(got, expected.flatten(1)) < torch.finfo(dtype).eps


def test_results_are_the_same_every_time() -> None:
    """Warps that are not in step may be in another order each time: what they give is not."""
    from layertap.kernels.specialized_product import product_plus, rotated_product

    bf16 = torch.bfloat16
    x, weight = random(8192, 512, dtype=bf16), random(1024, 512, dtype=bf16)
    residual = random(8192, 1024, dtype=bf16)
    norm, cos, sin = random(128, dtype=bf16), random(8192, 128, dtype=bf16), random(8192, 128, dtype=bf16)
    first = product_plus(x, weight, residual)
    turned = rotated_product(x, weight, None, norm, cos, sin, 1e-6)
    for _ in range(100):
        again = product_plus(x, weight, residual)
        assert all(torch.equal(a, f) for a, f in zip(again, first, strict=True))
        assert torch.equal(rotated_product(x, weight, None, norm, cos, sin, 1e-6), turned)


def test_in_place_of_what_is_added_in_a_chain() -> None:
    """Results that are inputs of the next product, as in a decoder."""
    from layertap.kernels.specialized_product import product_plus

    weight = random(256, 256, dtype=torch.bfloat16, scale=0.05)
    x = random(2000, 256, dtype=torch.bfloat16)
    expected = x
    for _ in range(20):
        x, _ = product_plus(x, weight, x)
        expected = (F.linear(expected.float(), weight.float()) + expected.float()).bfloat16()
    assert off_by(x, expected.float()) < 2e-2
