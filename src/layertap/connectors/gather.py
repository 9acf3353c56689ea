"""Rows out of the paged cache into a staging buffer: picked, cast, and each row's largest magnitude taken.

Shapes: n rows of a chunk, L kept layers, C cache columns, H hidden size. A slot is
``block_id * block_size + offset``.

The CPU side uses numpy on integer views: such copies and reductions release the GIL and run on the calling
thread alone, where torch operations would start a team of threads beside the one that computes the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layertap.kernels.triton_support import use_triton

Array = np.ndarray[Any, np.dtype[Any]]

FP8_MAX = 448.0
# Keeps the division finite; a token whose states are all zero dequantises to zero.
MIN_SCALE = float(torch.finfo(torch.float32).tiny)

_SIGNED: dict[int, np.dtype[Any]] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_TORCH_SIGNED = {2: torch.int16, 4: torch.int32}
_PIECE_BYTES = 1 << 20  # copied and reduced while still in the processor's cache
_ONE_THREAD = 32768  # torch runs operations of up to this many elements on the calling thread


@dataclass(slots=True)
class Chunk:
    """Rows in a staging buffer."""

    hidden: torch.Tensor
    """[n, L, H] on the CPU, in the storage dtype; a view of the staging buffer."""
    scales: torch.Tensor | None
    """[n, 1, 1] float32, for float8 only."""
    absmax: Array
    """[n, L] float32: the largest magnitude before the cast; NaN or infinite if a value is."""

    def part(self, begin: int, end: int) -> Chunk:
        """Rows ``begin..end``, in the same memory."""
        scales = None if self.scales is None else self.scales[begin:end]
        return Chunk(self.hidden[begin:end], scales, self.absmax[begin:end])


class Gather(ABC):
    """One writer thread's way out of the cache. Not shared between threads."""

    dtype: torch.dtype
    """Of the cache."""
    block_size: int
    hidden_size: int
    runs_ahead: bool
    """True where :meth:`start` returns before the copy is done: starting the next chunk early pays."""

    @abstractmethod
    def start(
        self,
        slots: Array,
        columns: Sequence[int],
        dtype: torch.dtype,
        buffer: torch.Tensor,
        ready: Collection[Any],
    ) -> Any:
        """Begin to copy. ``ready``: the events after which the rows are valid (CUDA)."""

    @abstractmethod
    def finish(self, started: Any) -> Chunk:
        """Wait until the rows are in the buffer."""


def view_of(
    buffer: torch.Tensor, n: int, num_layers: int, hidden_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """[n, L, H]: the front of a staging buffer."""
    size = n * num_layers * hidden_size * dtype.itemsize
    return buffer[:size].view(dtype).view(n, num_layers, hidden_size)


class CpuGather(Gather):
    """From a cache in host memory.

    Args:
        cache: [num_blocks, block_size, C, H] of any strides; float32, bfloat16 or float16.
    """

    runs_ahead = False

    def __init__(self, cache: torch.Tensor) -> None:
        self.dtype = cache.dtype
        self.block_size, self.num_columns, self.hidden_size = cache.shape[1:]
        self._blocks: Array = cache.view(_TORCH_SIGNED[cache.element_size()]).numpy()
        # Neighbouring blocks form one run where blocks lie back to back.
        self._flat: Array | None = None
        if cache.stride(0) == cache.stride(1) * self.block_size:
            self._flat = np.lib.stride_tricks.as_strided(
                self._blocks,
                (cache.shape[0] * self.block_size, *self._blocks.shape[2:]),
                self._blocks.strides[1:],
            )
        self._identity = tuple(range(self.num_columns))
        self._scratch: Array | None = None

    def start(
        self,
        slots: Array,
        columns: Sequence[int],
        dtype: torch.dtype,
        buffer: torch.Tensor,
        ready: Collection[Any],
    ) -> Chunk:
        n, layers, size = len(slots), len(columns), self.hidden_size
        hidden = view_of(buffer, n, layers, size, dtype)
        signed = _SIGNED[self.dtype.itemsize]
        bits_nL = np.empty((n, layers), dtype=signed)
        step = max(1, _PIECE_BYTES // (layers * size * self.dtype.itemsize))
        cast = dtype != self.dtype
        scales = np.empty((n, 1, 1), dtype=np.float32) if dtype == torch.float8_e4m3fn else None
        if cast:
            source = self._scratch_of(min(step, n) * layers * size)
        else:
            source = hidden.view(_TORCH_SIGNED[self.dtype.itemsize]).numpy()
        for begin in range(0, n, step):
            end = min(begin + step, n)
            piece = (
                source.reshape(-1)[: (end - begin) * layers * size].reshape(-1, layers, size)
                if cast
                else source[begin:end]
            )
            self._copy(slots[begin:end], columns, piece)
            magnitude_bits(piece, bits_nL[begin:end])
            if cast:
                values = torch.from_numpy(piece).view(self.dtype)
                if scales is not None:
                    scales[begin:end, 0, 0] = fp8_scales(_floats(bits_nL[begin:end], self.dtype))
                _cast(values, hidden[begin:end], None if scales is None else scales[begin:end])
        return Chunk(
            hidden, None if scales is None else torch.from_numpy(scales), _floats(bits_nL, self.dtype)
        )

    def finish(self, started: Any) -> Chunk:
        assert isinstance(started, Chunk)
        return started

    def _scratch_of(self, elements: int) -> Array:
        if self._scratch is None or self._scratch.size < elements:
            self._scratch = np.empty(elements, dtype=_SIGNED[self.dtype.itemsize])
        return self._scratch

    def _copy(self, slots: Array, columns: Sequence[int], out: Array) -> None:
        whole = tuple(columns) == self._identity
        for begin, end in self._runs(slots):
            slot = int(slots[begin])
            if self._flat is not None:
                rows = self._flat[slot : slot + end - begin]
            else:
                offset = slot % self.block_size
                rows = self._blocks[slot // self.block_size, offset : offset + end - begin]
            if whole:
                np.copyto(out[begin:end], rows)
            else:
                for i, column in enumerate(columns):
                    np.copyto(out[begin:end, i], rows[:, column])

    def _runs(self, slots: Array) -> list[tuple[int, int]]:
        if len(slots) == 1:
            return [(0, 1)]
        breaks = np.diff(slots) != 1
        if self._flat is None:
            breaks |= slots[1:] % self.block_size == 0
        cuts = (np.flatnonzero(breaks) + 1).tolist()
        return list(zip([0, *cuts], [*cuts, len(slots)], strict=True))


def magnitude_bits(x_nLH: Array, out_nL: Array) -> None:
    """The largest magnitude over H of floats seen as signed integers, as bits without the sign.

    Floats of one sign order like their bits, and infinity and NaN above all others, so two integer maxima do
    it: the signed one finds the largest positive number, the unsigned one the largest negative.
    """
    sign = np.iinfo(x_nLH.dtype).min
    positive = np.maximum(x_nLH.max(axis=2), 0)
    negative = x_nLH.view(f"u{x_nLH.itemsize}").max(axis=2).view(x_nLH.dtype)
    negative = np.where(negative < 0, negative ^ sign, 0)
    np.maximum(positive, negative, out=out_nL, casting="unsafe")


def _floats(bits: Array, dtype: torch.dtype) -> Array:
    """Float32 values of magnitude bits."""
    if dtype == torch.bfloat16:
        return (bits.astype(np.int32) << 16).view(np.float32)
    if dtype == torch.float16:
        return bits.view(np.float16).astype(np.float32)
    floats: Array = bits.view(np.float32)
    return floats


def fp8_scales(absmax_nL: Array) -> Array:
    """[n] float32: a token's largest magnitude / 448."""
    scales: Array = np.maximum(absmax_nL.max(axis=1) / np.float32(FP8_MAX), np.float32(MIN_SCALE))
    return scales


def _cast(values_nLH: torch.Tensor, out_nLH: torch.Tensor, scales_n11: Array | None) -> None:
    """Cast in pieces that torch runs on this thread."""
    size = values_nLH.shape[1] * values_nLH.shape[2]
    if scales_n11 is None:
        source, target = values_nLH.reshape(-1), out_nLH.reshape(-1)
        for i in range(0, source.numel(), _ONE_THREAD):
            target[i : i + _ONE_THREAD].copy_(source[i : i + _ONE_THREAD])
        return
    source, target = values_nLH.reshape(-1, size), out_nLH.reshape(-1, size)
    scales = torch.from_numpy(scales_n11.reshape(-1, 1))
    rows = max(1, _ONE_THREAD // size)
    width = min(size, _ONE_THREAD)
    for i in range(0, source.shape[0], rows):
        for j in range(0, size, width):
            part = source[i : i + rows, j : j + width].float().div_(scales[i : i + rows])
            target[i : i + rows, j : j + width].copy_(part)


class PagedRows:
    """Picks rows out of a cache on a GPU, with their largest magnitudes.

    Args:
        cache: [num_blocks, block_size, C, H] of any strides.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self._block_size = cache.shape[1]
        self._columns: dict[tuple[int, ...], torch.Tensor] = {}

    def pick(self, slots_n: torch.Tensor, columns: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [n, L, H], contiguous, and the bits [n, L] int32 of their largest magnitudes (see
        :func:`magnitude_bits`). ``slots_n``: [n] int64 on the cache's device."""
        key = tuple(columns)
        if key not in self._columns:
            self._columns.clear()
            self._columns[key] = torch.tensor(key, device=self._cache.device)
        columns_L = self._columns[key]
        if use_triton(self._cache) and self._cache.stride(3) == 1:
            from layertap.kernels.paged_gather import gather_rows

            return gather_rows(self._cache, slots_n, columns_L, self._block_size)
        block, offset = slots_n // self._block_size, slots_n % self._block_size
        rows = self._cache[block[:, None], offset[:, None], columns_L[None, :]]
        signed = rows.view(_TORCH_SIGNED[rows.element_size()])
        return rows, (signed & torch.iinfo(signed.dtype).max).amax(dim=2).int()


def floats_of_bits(bits_nL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values of int32 magnitude bits of ``dtype``, on any device."""
    if dtype == torch.bfloat16:
        return (bits_nL << 16).view(torch.float32)
    if dtype == torch.float16:
        return bits_nL.to(torch.int16).view(torch.float16).float()
    return bits_nL.view(torch.float32)


class CudaGather(Gather):
    """From a cache on a GPU, on a stream of its own, into pinned buffers.

    Scratch memory on the device: the rows of one chunk, in the cache's dtype and in the storage dtype.
    """

    runs_ahead = True

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self.dtype = cache.dtype
        self.block_size, self.hidden_size = cache.shape[1], cache.shape[3]
        # Ahead of the model's kernels, which fill the device: behind them rows would wait for the end of the
        # step that is computed meanwhile.
        self._stream = torch.cuda.Stream(cache.device, priority=-1)  # type: ignore[no-untyped-call]
        self._rows = PagedRows(cache)

    def start(
        self,
        slots: Array,
        columns: Sequence[int],
        dtype: torch.dtype,
        buffer: torch.Tensor,
        ready: Collection[Any],
    ) -> Any:
        device = self._cache.device
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            for event in ready:
                self._stream.wait_event(event)
            # Pinned: a copy from pageable memory waits for all that the stream waits for.
            where = torch.from_numpy(slots).pin_memory().to(device, non_blocking=True)
            rows, bits = self._rows.pick(where, columns)
            scales = None
            if dtype == torch.float8_e4m3fn:
                largest = floats_of_bits(bits, self.dtype).amax(dim=1)[:, None, None]
                # By a tensor: a division by a scalar becomes a multiplication on a GPU and rounds otherwise.
                scales = (largest / torch.full_like(largest, FP8_MAX)).clamp_(min=MIN_SCALE)
                rows = rows.float().div_(scales).to(dtype)
                scales = _to_pinned(scales)
            else:
                rows = rows.to(dtype)
            bits = _to_pinned(bits)
            # Blocking: a writer that waits leaves its core alone.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            # Last, when nothing can be short of memory any more: after a failure nobody waits for this copy,
            # and the buffer goes to another job.
            hidden = view_of(buffer, len(slots), len(columns), self.hidden_size, dtype)
            hidden.copy_(rows, non_blocking=True)
            done.record(self._stream)
            return hidden, scales, bits, rows, done

    def finish(self, started: Any) -> Chunk:
        hidden, scales, bits, _, done = started
        done.synchronize()
        return Chunk(hidden, scales, floats_of_bits(bits, self.dtype).numpy())


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, there once the current stream has come so far."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    target.copy_(tensor, non_blocking=True)
    return target
