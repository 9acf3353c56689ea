"""What the tests of kernels compare with PyTorch's results in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def off_by(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def assert_sum_and_squares(
    product_plus: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    from layertap.kernels.fused_product import num_squares

    before = residual.clone()
    got, squares = product_plus(x, weight, residual)
    expected = residual.float() + F.linear(x.float(), weight.float())
    assert off_by(got, expected) < torch.finfo(x.dtype).eps
    assert torch.equal(residual, before)
    assert squares.shape == (len(x), num_squares(len(weight)))
    torch.testing.assert_close(squares.sum(1), got.float().pow(2).sum(1), rtol=1e-5, atol=0)
