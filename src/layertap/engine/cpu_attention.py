"""Attention of a whole step in one call, on a CPU: builds and calls ``cpu_attention.cpp``.

PyTorch's CPU kernel takes one sequence at a time and reaches a tenth of what the cores' matrix products do
(docs/performance.md). This one is compiled at its first use, in a few seconds, with the machine's C++
compiler, and kept in the user's cache. Where there is no compiler, or what it made does not agree with
PyTorch's kernel, that one goes on doing the work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from layertap import native

if TYPE_CHECKING:
    from layertap.engine.attention import AttentionLayer, BatchLayout

logger = logging.getLogger("layertap")

_SOURCE = Path(__file__).with_suffix(".cpp")
_SOURCES = (_SOURCE, _SOURCE.with_name("cpu_attention_amx.h"))
_FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-fopenmp", "-fPIC", "-shared")
_FUNCTIONS = {torch.float32: "layertap_attention_float32", torch.bfloat16: "layertap_attention_bfloat16"}
_LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

_POINTERS = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "out",
    "sinks",
    "starts",
    "contexts",
    "slots",
    "mapping",
)
_NUMBERS = (
    "query_head", "query_token", "key_head", "key_token", "value_head", "value_token",
    "key_slot", "key_slot_head", "value_slot", "value_slot_head", "out_token", "out_head",
    "sequences", "heads", "kv_heads", "key_dim", "value_dim", "window", "threads",
)  # fmt: skip


class _Call(ctypes.Structure):
    """``struct Call`` of the C++ side, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class StepArrays:
    """The layout of a step as the kernel reads it; made once a step, used by all layers."""

    def __init__(self, layout: BatchLayout) -> None:
        self.starts = np.asarray(layout.query_starts, dtype=np.int64)
        self.contexts = np.asarray(layout.context_lens, dtype=np.int64)
        self._slots = layout.slots  # kept alive: the kernel has their addresses
        addresses = [0 if s is None else s.data_ptr() for s in layout.slots]
        self.slots = np.asarray(addresses, dtype=np.uint64)


def supports(layer: AttentionLayer, query: torch.Tensor) -> bool:
    """Whether the kernel is there and computes this layer. Queries that do not fit its keys, which lie in the
    cache, are left to PyTorch, which refuses them."""
    cache = layer.key_cache
    return (
        query.device.type == "cpu"
        and query.dtype in _FUNCTIONS
        and layer.native
        and cache is not None
        and query.dtype == cache.dtype
        and query.shape[3] == cache.shape[2]
        and query.shape[1] % cache.shape[1] == 0
        and library() is not None
    )


def attend(
    layer: AttentionLayer,
    layout: BatchLayout,
    q_1QTD: torch.Tensor,
    k_1KTD: torch.Tensor,
    v_1KTV: torch.Tensor,
    kernel: ctypes.CDLL | None = None,
) -> torch.Tensor:
    """Put the step's keys and values into the cache, then attend. Returns [1, T, Q, V].

    ``kernel``: None takes :func:`library`.

    Raises:
        ValueError: keys or values do not fit the cache.
    """
    kernel = kernel or library()
    assert kernel is not None
    assert layer.key_cache is not None
    assert layer.value_cache is not None
    for name, rows, cache in (("keys", k_1KTD, layer.key_cache), ("values", v_1KTV, layer.value_cache)):
        fits = (*cache.shape[1:], cache.dtype)
        if (rows.shape[1], rows.shape[3], rows.dtype) != fits or rows.shape[2] != q_1QTD.shape[2]:
            given = f"{name} {list(rows.shape)} {rows.dtype}"
            raise ValueError(f"{given}: the cache takes (heads, dim, dtype) {fits}")
    if layout.arrays is None:
        layout.arrays = StepArrays(layout)
    q, k, v = (_rows(x) for x in (q_1QTD, k_1KTD, v_1KTV))
    _, heads, tokens, key_dim = q.shape
    out = q.new_empty(1, tokens, heads, layer.value_dim)
    sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
    call = _Call(
        query=q.data_ptr(), key=k.data_ptr(), value=v.data_ptr(), out=out.data_ptr(),
        key_cache=layer.key_cache.data_ptr(), value_cache=layer.value_cache.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        starts=layout.arrays.starts.ctypes.data, contexts=layout.arrays.contexts.ctypes.data,
        slots=layout.arrays.slots.ctypes.data, mapping=layout.slot_mapping.data_ptr(),
        query_head=q.stride(1), query_token=q.stride(2), key_head=k.stride(1), key_token=k.stride(2),
        value_head=v.stride(1), value_token=v.stride(2),
        key_slot=layer.key_cache.stride(0), key_slot_head=layer.key_cache.stride(1),
        value_slot=layer.value_cache.stride(0), value_slot_head=layer.value_cache.stride(1),
        out_token=out.stride(1), out_head=out.stride(2),
        sequences=len(layout.context_lens), heads=heads, kv_heads=k.shape[1],
        key_dim=key_dim, value_dim=layer.value_dim, window=layer.window or 0,
        threads=torch.get_num_threads(), scale=layer.scale, softcap=layer.softcap or 0.0,
    )  # fmt: skip
    getattr(kernel, _FUNCTIONS[q.dtype])(ctypes.byref(call))
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, built if need be; None where that is not possible. The reason is logged once."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    loaded = native.build(_SOURCE, _SOURCES[1:], _FLAGS, "attention on this CPU runs through PyTorch")
    if loaded is None:
        return None
    for name in _FUNCTIONS.values():
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_void_p]
        function.restype = None
    for dtype, largest in _LARGEST_DIFFERENCE.items():
        if not _difference(loaded, dtype) < largest:  # NaN too
            logger.warning("the attention kernel is wrong in %s on this machine: PyTorch's is used", dtype)
            return None
    return loaded


def _difference(loaded: ctypes.CDLL, dtype: torch.dtype) -> float:
    """Relative difference of the kernel to PyTorch's attention in float32, for two sequences, one with a
    context."""
    from layertap.engine.attention import AttentionLayer, BatchLayout, StepState

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    layer = AttentionLayer(StepState(), num_kv_heads=2, key_dim=32, value_dim=32, scale=0.2, native=False)
    layer.key_cache, layer.value_cache = draw(200, 2, 32), draw(200, 2, 32)
    own = torch.arange(199, 79, -1)
    layout = BatchLayout(torch.cat([torch.arange(80), own[50:]]), [0, 80, 150], [0, 50], [None, own])
    q, k, v = draw(1, 6, 150, 32), draw(1, 2, 150, 32), draw(1, 2, 150, 32)
    ours = attend(layer, layout, q, k, v, loaded).float()
    layer.key_cache, layer.value_cache = layer.key_cache.float(), layer.value_cache.float()
    theirs = layer.attend_each(layout, q.float(), k.float(), v.float())
    return float((ours - theirs).norm() / theirs.norm())
