"""The kernel against the formula in float64: on a GPU, or with Triton and ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA and not INTERPRETED, reason="needs a GPU, or Triton's interpreter"),
]
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
EPS = 1e-6


def formula(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    r = x.double()
    if weight is not None:
        r = r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    a, b = r.chunk(2, dim=-1)
    return r * cos.double().unsqueeze(2) + torch.cat((-b, a), dim=-1) * sin.double().unsqueeze(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (7, 3, 32), (130, 8, 128), (33, 40, 256)])
def test_norm_rope(dtype: torch.dtype, with_norm: bool, tokens: int, heads: int, size: int) -> None:
    from layertap.kernels.norm_rope import norm_rope

    generator = torch.Generator().manual_seed(tokens)
    x = (torch.randn(1, tokens, heads, size, generator=generator) * 3).to(DEVICE, dtype)
    weight = torch.randn(size, generator=generator).to(DEVICE, dtype) if with_norm else None
    cos, sin = (torch.randn(1, tokens, size, generator=generator).to(DEVICE, dtype) for _ in range(2))
    got = norm_rope(x, weight, cos, sin, EPS)
    assert got.is_contiguous()
    assert got.dtype == dtype
    expected = formula(x, weight, cos, sin)
    assert float((got.double() - expected).norm() / expected.norm()) < torch.finfo(dtype).eps


def test_rows_that_do_not_follow_one_another() -> None:
    from layertap.kernels.norm_rope import norm_rope

    wide = torch.randn(1, 9, 5, 96, device=DEVICE)
    x = wide[..., 32:]
    angles = torch.randn(1, 9, 2, 64, device=DEVICE)
    cos, sin = angles[:, :, 0], angles[:, :, 1]
    before = wide.clone()
    got = norm_rope(x, None, cos, sin, 0.0)
    torch.testing.assert_close(got.double(), formula(x, None, cos, sin), rtol=1e-5, atol=1e-5)
    assert torch.equal(wide, before)
