"""Heads normalised (or not) and rotated in one pass over memory.

A rotation needs both halves of a head. What ``torch.compile`` makes of the usual formula reads each number
twice; here a thread holds both halves.

Shapes: 1 a batch of one, T tokens, N heads, D their size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layertap.kernels.triton_support import on_device_of

_TOKENS, _HEADS = 4, 8
"""Of a program."""


@triton.jit(do_not_specialize=["tokens", "eps"])
def _norm_rope(
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    heads,
    x_token,
    x_head,
    cos_token,
    sin_token,
    eps,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
    place = tl.arange(0, HALF)[None, None, :]
    there = (token < tokens) & (head < heads)
    known = token < tokens
    source = x + token * x_token + head * x_head + place
    a = tl.load(source, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        mean = (tl.sum(a * a, axis=2) + tl.sum(b * b, axis=2)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, :, None]
        a = a * scale * tl.load(weight + place).to(tl.float32)
        b = b * scale * tl.load(weight + HALF + place).to(tl.float32)
    cos_at = cos + token * cos_token + place
    sin_at = sin + token * sin_token + place
    cos_a = tl.load(cos_at, mask=known, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_at + HALF, mask=known, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_at, mask=known, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_at + HALF, mask=known, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * (2 * HALF) + place
    tl.store(target, (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=there)
    tl.store(target + HALF, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=there)


def norm_rope(
    x_1TND: torch.Tensor,
    weight_D: torch.Tensor | None,
    cos_1TD: torch.Tensor,
    sin_1TD: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """``r * cos + rotate_half(r) * sin`` with ``r = rms_norm(x) * weight``, or ``r = x`` without a weight;
    computed in float32 and rounded once.

    Args:
        x_1TND: [1, T, N, D] on a GPU; D a power of two, and contiguous.
        weight_D: [D]
        cos_1TD: [1, T, D], its rows contiguous; ``sin_1TD`` alike.

    Returns:
        [1, T, N, D], contiguous.
    """
    _, tokens, heads, size = x_1TND.shape
    assert x_1TND.stride(3) == cos_1TD.stride(2) == sin_1TD.stride(2) == 1
    assert cos_1TD.shape == sin_1TD.shape == (1, tokens, size)
    out = torch.empty(x_1TND.shape, dtype=x_1TND.dtype, device=x_1TND.device)
    together = min(_HEADS, triton.next_power_of_2(heads))
    with on_device_of(x_1TND):
        _norm_rope[(triton.cdiv(tokens, _TOKENS), triton.cdiv(heads, together))](
            x_1TND,
            x_1TND if weight_D is None else weight_D,
            cos_1TD,
            sin_1TD,
            out,
            tokens,
            heads,
            x_1TND.stride(1),
            x_1TND.stride(2),
            cos_1TD.stride(1),
            sin_1TD.stride(1),
            eps,
            _TOKENS,
            together,
            size // 2,
            weight_D is not None,
        )
    return out
