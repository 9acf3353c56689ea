"""FlashAttention-3 for Hopper GPUs, from the package ``fa3-fwd`` (extra ``fa3``) where it is installed.

The package has the forward kernel for bfloat16 without sliding windows; everything else goes to PyTorch's
built-in FlashAttention-2.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("layertap")

_TOLERANCE = 2e-2


def supports(q_TQD: torch.Tensor, window: int | None) -> bool:
    """Whether the kernel is there and does this."""
    return q_TQD.dtype == torch.bfloat16 and window is None and _operator_for(q_TQD) is not None


def attention(
    q_TQD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    out_TQD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention as :func:`layertap.engine.varlen.varlen_attention` does it. Returns [T, Q, D]."""
    operator = _operator_for(q_TQD)
    assert operator is not None
    return _call(
        operator, q_TQD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, out_TQD
    )


def _call(
    operator: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    given: torch.Tensor | None = None,
) -> torch.Tensor:
    out = operator(
        q,
        k,
        v,
        out=given,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scale,
        is_causal=True,
        num_splits=1,  # over keys: then a sequence's result does not depend on what else is in the batch
    )
    result: torch.Tensor = out[0]
    return result


def _operator_for(q_TQD: torch.Tensor) -> Callable[..., Any] | None:
    return _operator(q_TQD.device, q_TQD.shape[2])


@functools.cache
def _operator(device: torch.device, head_dim: int) -> Callable[..., Any] | None:
    """The kernel, if it is installed and, asked here once, agrees with PyTorch's attention on this device and
    for this size of a head: builds may leave sizes out."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        import fa3_fwd._C  # noqa: F401
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        logger.warning("fa3-fwd is not used: %s", error)
        return None
    operator: Callable[..., Any] = torch.ops.fa3_fwd.fwd
    try:
        difference = _difference(operator, device, head_dim)
    except RuntimeError as error:
        logger.warning("fa3-fwd is not used for heads of %d: it failed: %s", head_dim, error)
        return None
    if not difference < _TOLERANCE:
        logger.warning(
            "fa3-fwd is not used for heads of %d: its result differs by %.1e from PyTorch's",
            head_dim,
            difference,
        )
        return None
    return operator


def _difference(operator: Callable[..., Any], device: torch.device, head_dim: int) -> float:
    """Relative difference from PyTorch's own kernel on two short sequences with shared key heads."""
    from layertap.engine.varlen import built_in_attention

    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(40, heads, head_dim, device=device, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    starts = torch.tensor([0, 7, 40], dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    ours = _call(operator, q, k, v, starts, starts, 33, 33, scale)
    theirs = built_in_attention(q, k, v, starts, starts, 33, 33, scale, None)
    return float((ours - theirs).float().norm() / theirs.float().norm())
