"""Fused products against PyTorch's in float32: on a Hopper GPU, or with Triton and ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from kernels.comparisons import assert_sum_and_squares, off_by

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER and not INTERPRETED, reason="needs a Hopper GPU, or Triton's interpreter"),
]
DEVICE = "cuda" if HOPPER else "cpu"
# The interpreter of Triton 3.6 reads tensor descriptors of bfloat16 wrongly.
DTYPES = [torch.float16, torch.bfloat16] if HOPPER else [torch.float16]
SIZES = [(1, 64, 16), (130, 72, 136), (300, 136, 264), (1000, 1024, 520)]
"""Tokens, depth, columns: with parts of a tile at every edge, and more tiles than programs."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_gated_product(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    from layertap.kernels.fused_product import gated_product

    x = torch.randn(rows, depth, device=DEVICE).to(dtype)
    gate, up = ((torch.randn(columns, depth, device=DEVICE) * 0.1).to(dtype) for _ in range(2))
    got = gated_product(x, torch.stack([gate, up], dim=1).flatten(0, 1))
    expected = F.silu(F.linear(x.float(), gate.float())) * F.linear(x.float(), up.float())
    assert got.shape == (rows, columns)
    assert off_by(got, expected) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_product_plus(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    from layertap.kernels.fused_product import product_plus

    x = torch.randn(rows, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(columns, depth, device=DEVICE) * 0.1).to(dtype)
    residual = torch.randn(rows, columns, device=DEVICE).to(dtype)
    assert_sum_and_squares(product_plus, x, weight, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_scaled_products(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    from layertap.kernels.fused_product import gated_product, scaled_product

    x = torch.randn(rows, depth, device=DEVICE).to(dtype)
    scale = torch.rand(rows, device=DEVICE) + 0.1
    weight = (torch.randn(2 * columns, depth, device=DEVICE) * 0.1).to(dtype)
    expected = F.linear(x.float(), weight.float()) * scale[:, None]
    got = scaled_product(x, weight[:columns], scale)
    assert off_by(got, expected[:, :columns]) < torch.finfo(dtype).eps
    gate, up = expected.view(rows, -1, 2).unbind(-1)
    assert off_by(gated_product(x, weight, scale), F.silu(gate) * up) < torch.finfo(dtype).eps


def test_large_gates_stay_finite() -> None:
    from layertap.kernels.fused_product import gated_product

    x = torch.full((128, 64), 30.0, device=DEVICE, dtype=DTYPES[0])
    weight = torch.ones(32, 64, device=DEVICE, dtype=DTYPES[0])
    weight[::4] = -1  # gates of -1920 and 1920
    weight[1::2] = 0.001
    out = gated_product(x, weight)
    assert torch.equal(out[:, ::2], torch.zeros_like(out[:, ::2]))
    assert bool(torch.isfinite(out).all())
    assert bool((out[:, 1::2] > 1000).all())


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [5, 128, 777])
def test_operators_take_any_number_of_rows_and_any_strides(rows: int) -> None:
    from layertap.engine import fused_products

    weight = (torch.randn(512, 256, device="cuda") * 0.1).bfloat16()
    assert fused_products.takes(weight)
    x = torch.randn(1, 256, rows, device="cuda").bfloat16().transpose(1, 2)
    residual = torch.randn(1, 512, rows, device="cuda").bfloat16().transpose(1, 2)
    plain = F.linear(x.float(), weight.float())
    assert off_by(torch.ops.layertap.product_plus(x, weight, residual), residual + plain) < 8e-3
    gated = torch.ops.layertap.gated_product(x, weight)
    assert gated.shape == (1, rows, 256)
    assert off_by(gated, F.silu(plain[..., ::2]) * plain[..., 1::2]) < 8e-3
