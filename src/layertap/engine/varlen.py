"""Variable-length causal attention on CUDA: FlashAttention-3 where it is installed and can, else PyTorch's
built-in FlashAttention-2."""

from __future__ import annotations

import inspect

import torch

from layertap.engine import flash_attention_3


def _gqa_arguments() -> dict[str, bool]:
    """Releases from 2.13 on want to be told that key heads are shared; earlier ones take them without a
    word."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


_GQA: dict[str, bool] | None = None


def varlen_attention(
    q_TQD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    out_TQD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each sequence's queries see its own keys, causally, aligned at the end. Returns [T, Q, D].

    Args:
        window: a query sees this many tokens, itself included; None sees all before it.
        out_TQD: where the result may be put; a kernel that cannot returns it elsewhere.
    """
    if flash_attention_3.supports(q_TQD, window):
        return flash_attention_3.attention(
            q_TQD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, out_TQD
        )
    return built_in_attention(
        q_TQD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, window
    )


def built_in_attention(
    q_TQD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The same through PyTorch alone."""
    from torch.nn.attention.varlen import varlen_attn

    global _GQA
    if _GQA is None:
        _GQA = _gqa_arguments()
    left = -1 if window is None else window - 1
    out = varlen_attn(
        q_TQD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale=scale, window_size=(left, 0), **_GQA,  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out
