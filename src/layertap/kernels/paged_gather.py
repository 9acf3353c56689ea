"""Rows out of a paged cache of hidden states, with each row's largest magnitude, in one pass over them.

Shapes: n rows, L kept layers, C cache columns, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layertap.kernels.triton_support import on_device_of

_BITS = {2: torch.int16, 4: torch.int32}


@triton.jit
def _gather_rows(
    cache,
    slots,
    columns,
    out,
    magnitudes,
    block_stride,
    slot_stride,
    column_stride,
    block_size,
    layers,
    WIDTH: tl.constexpr,
    WITHOUT_SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.load(slots + row)
    column = tl.load(columns + layer)
    source = cache + (slot // block_size) * block_stride + (slot % block_size) * slot_stride
    source += column * column_stride
    target = out + (row * layers + layer) * WIDTH
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        bits = tl.load(source + i, mask=i < WIDTH, other=0)
        tl.store(target + i, bits, mask=i < WIDTH)
        largest = tl.maximum(largest, bits.to(tl.int32) & WITHOUT_SIGN)
    tl.store(magnitudes + row * layers + layer, tl.max(largest, axis=0))


def gather_rows(
    cache: torch.Tensor, slots_n: torch.Tensor, columns_L: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick rows, and find each one's largest magnitude.

    Floats without their sign order like their bits, with infinity and NaN above all numbers; so the largest
    bits are those of the largest magnitude.

    Args:
        cache: [num_blocks, block_size, C, H] of 16 or 32 bits, on a GPU; any strides but 1 in
            the last dimension.
        slots_n: [n] int64 on the same device; a slot is ``block_id * block_size + offset``.
        columns_L: [L] int64 on the same device.

    Returns:
        Rows [n, L, H] in the cache's dtype, contiguous, and [n, L] int32: the bits of the largest magnitudes.
    """
    assert cache.stride(3) == 1
    bits = cache.view(_BITS[cache.element_size()])
    n, layers, width = slots_n.shape[0], columns_L.shape[0], cache.shape[3]
    out = torch.empty(n, layers, width, dtype=bits.dtype, device=cache.device)
    magnitudes_nL = torch.empty(n, layers, dtype=torch.int32, device=cache.device)
    with on_device_of(cache):
        _gather_rows[(n, layers)](
            bits,
            slots_n,
            columns_L,
            out,
            magnitudes_nL,
            bits.stride(0),
            bits.stride(1),
            bits.stride(2),
            block_size,
            layers,
            WIDTH=width,
            WITHOUT_SIGN=0x7FFF if bits.dtype == torch.int16 else 0x7FFFFFFF,
            BLOCK=min(2048, triton.next_power_of_2(width)),
        )
    return out.view(cache.dtype), magnitudes_nL
