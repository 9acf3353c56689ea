"""Rows into a paged cache, and keys and values out of it.

PyTorch's indexing moves element by element; here a program moves a token's row with wide loads. On an H200:
16,384 rows of 4,096 bfloat16 numbers in 0.07 instead of 0.20 ms, keys and values of 8 heads in 0.04 instead
of 0.11 ms.

Shapes: T tokens of a step, K key/value heads, D key dim, V value dim, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layertap.kernels.triton_support import on_device_of


@triton.jit
def _store_rows(
    source,
    target,
    slots,
    source_stride,
    target_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = tl.load(source + token * source_stride + i, mask=i < WIDTH)
        tl.store(target + slot * target_stride + i, row, mask=i < WIDTH)


@triton.jit
def _store_keys_values(
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    i = tl.arange(0, KEY_BLOCK)
    head = (i // KEY_DIM).to(tl.int64)  # heads may lie far apart
    row = keys + token * key_token_stride + head * key_head_stride + i % KEY_DIM
    tl.store(key_cache + slot * KEY_WIDTH + i, tl.load(row, mask=i < KEY_WIDTH), mask=i < KEY_WIDTH)
    j = tl.arange(0, VALUE_BLOCK)
    head = (j // VALUE_DIM).to(tl.int64)
    row = values + token * value_token_stride + head * value_head_stride + j % VALUE_DIM
    tl.store(value_cache + slot * VALUE_WIDTH + j, tl.load(row, mask=j < VALUE_WIDTH), mask=j < VALUE_WIDTH)


@triton.jit
def _load_keys_values(
    key_cache,
    value_cache,
    slots,
    keys,
    values,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    i = tl.arange(0, KEY_BLOCK)
    row = tl.load(key_cache + slot * KEY_WIDTH + i, mask=i < KEY_WIDTH)
    tl.store(keys + token * KEY_WIDTH + i, row, mask=i < KEY_WIDTH)
    j = tl.arange(0, VALUE_BLOCK)
    row = tl.load(value_cache + slot * VALUE_WIDTH + j, mask=j < VALUE_WIDTH)
    tl.store(values + token * VALUE_WIDTH + j, row, mask=j < VALUE_WIDTH)


def store_rows(source_TH: torch.Tensor, target: torch.Tensor, slots_T: torch.Tensor) -> None:
    """``target[slots] = source``.

    Args:
        source_TH: [T, H], on a GPU.
        target: [slots, H], rows contiguous, any stride between them.
        slots_T: [T] int64, each slot once.

    Raises:
        ValueError: the rows are not what the cache holds.
    """
    _check(source_TH, target, slots_T)
    if source_TH.stride(1) != 1:
        source_TH = source_TH.contiguous()
    assert target.stride(1) == 1
    tokens, width = source_TH.shape
    block = min(2048, triton.next_power_of_2(width))
    with on_device_of(target):
        _store_rows[(tokens,)](
            source_TH, target, slots_T, source_TH.stride(0), target.stride(0), WIDTH=width, BLOCK=block
        )


def store_keys_values(
    keys_TKD: torch.Tensor,
    values_TKV: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """``key_cache[slots] = keys`` and ``value_cache[slots] = values``, in one launch.

    Args:
        keys_TKD: [T, K, D] of any strides between tokens and heads, on a GPU.
        values_TKV: [T, K, V] likewise.
        key_cache: [slots, K, D], contiguous.
        value_cache: [slots, K, V], contiguous.
        slots_T: [T] int64, each slot once.

    Raises:
        ValueError: keys or values are not what the caches hold.
    """
    _check(keys_TKD, key_cache, slots_T)
    _check(values_TKV, value_cache, slots_T)
    if keys_TKD.stride(2) != 1:
        keys_TKD = keys_TKD.contiguous()
    if values_TKV.stride(2) != 1:
        values_TKV = values_TKV.contiguous()
    tokens, heads, key_dim = keys_TKD.shape
    value_dim = values_TKV.shape[2]
    with on_device_of(key_cache):
        _store_keys_values[(tokens,)](
            keys_TKD,
            values_TKV,
            key_cache,
            value_cache,
            slots_T,
            keys_TKD.stride(0),
            keys_TKD.stride(1),
            values_TKV.stride(0),
            values_TKV.stride(1),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_WIDTH=heads * key_dim,
            VALUE_WIDTH=heads * value_dim,
            KEY_BLOCK=triton.next_power_of_2(heads * key_dim),
            VALUE_BLOCK=triton.next_power_of_2(heads * value_dim),
        )


def load_keys_values(
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``key_cache[slots]`` [M, K, D] and ``value_cache[slots]`` [M, K, V], in one launch.

    Args:
        key_cache: [slots, K, D], contiguous, on a GPU.
        value_cache: [slots, K, V], contiguous.
        slots_M: [M] int64; a slot may come more than once.
    """
    count = slots_M.shape[0]
    keys = key_cache.new_empty(count, *key_cache.shape[1:])
    values = value_cache.new_empty(count, *value_cache.shape[1:])
    key_width, value_width = key_cache[0].numel(), value_cache[0].numel()
    with on_device_of(key_cache):
        _load_keys_values[(count,)](
            key_cache,
            value_cache,
            slots_M,
            keys,
            values,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            KEY_BLOCK=triton.next_power_of_2(key_width),
            VALUE_BLOCK=triton.next_power_of_2(value_width),
        )
    return keys, values


def _check(rows: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor) -> None:
    """A kernel would write beyond a row, read beyond the last one, or round in silence."""
    fits = (len(slots_T), *cache.shape[1:])
    if rows.shape != fits or rows.dtype != cache.dtype:
        raise ValueError(f"{rows.dtype} {tuple(rows.shape)} for slots of {cache.dtype} {fits}")
