"""A step of the decoder, recorded as CUDA graphs and replayed.

Launching the kernels of a step takes the host about a millisecond a layer: as long as a small model computes.
Steps of one size have always the same shapes, all but attention's. So everything between two attentions is
recorded once as a graph; a replay launches a graph, an attention, the next graph, and so on.

Shapes: 1 a batch of one, T tokens of the step, Q query heads, K key/value heads, D key dim, V value dim.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layertap.engine.attention import AttentionLayer, BatchLayout

if TYPE_CHECKING:
    from layertap.engine.verifier import Verifier


class _Recording(threading.local):
    graph: StepGraph | None = None


_recording = _Recording()


def recording() -> StepGraph | None:
    """The step that this thread is recording."""
    return _recording.graph


@dataclass(slots=True)
class _Attention:
    """One attention between two graphs, with the memory that they leave its inputs in and take its output
    from."""

    layer: AttentionLayer
    q: torch.Tensor
    """[1, Q, T, D]"""
    k: torch.Tensor
    """[1, K, T, D]"""
    v: torch.Tensor
    """[1, K, T, V]"""
    out: torch.Tensor
    """[1, T, Q, V]"""

    def run(self, num_tokens: int) -> None:
        n = num_tokens
        self.layer(self.q[:, :, :n], self.k[:, :, :n], self.v[:, :, :n], self.out[:, :n])


class GraphMemory:
    """What recorded steps compute in: the same for all of them, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @functools.cached_property
    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()


class StepGraph:
    """The decoder over ``num_tokens`` tokens. Its layers are compiled, and have run at this size before.

    Args:
        padding_slot: where tokens that fill up a step are stored.
    """

    def __init__(self, verifier: Verifier, num_tokens: int, padding_slot: int) -> None:
        device = verifier.device
        self.num_tokens = num_tokens
        self.ids_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.slots_T = torch.full((num_tokens,), padding_slot, dtype=torch.int64, device=device)
        """Of the tokens whose states are stored; read by what is recorded."""
        self._padding_slot = padding_slot
        self._verifier = verifier
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._attentions: list[_Attention] = []
        self._output: Any = None
        self.num_replays = 0

    # --- recording ----------------------------------------------------------------------------------------

    def record(self, memory: GraphMemory) -> None:
        """Record the decoder's forward. Nothing is computed.

        Args:
            memory: that this step shares with others.

        Raises:
            RuntimeError: it does something that cannot be recorded.
        """
        verifier = self._verifier
        device = verifier.device
        arguments = verifier.packed_arguments(self.ids_T, self.positions_T)
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self._pool = memory.pool
        _recording.graph = self
        try:
            with torch.cuda.stream(memory.stream):
                self._begin()
                try:
                    self._output = verifier.decoder.forward(**arguments)
                finally:
                    self._graphs[-1].capture_end()
        finally:
            _recording.graph = None

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """An attention while recording: one graph ends, the next begins. Returns its output's memory."""
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])
        self._graphs[-1].capture_end()
        self._attentions.append(_Attention(layer, _borrow(q), _borrow(k), _borrow(v), _borrow(out)))
        self._begin()
        return out

    # --- replaying ----------------------------------------------------------------------------------------

    def fill(
        self,
        ids: np.ndarray[Any, np.dtype[np.int64]],
        positions: np.ndarray[Any, np.dtype[np.int64]],
        slots: np.ndarray[Any, np.dtype[np.int64]],
    ) -> None:
        """Put a step's tokens in, once the steps before it are done with theirs."""
        host = torch.empty(3, self.num_tokens, dtype=torch.int64, pin_memory=True)
        rows = host.numpy()
        count = len(ids)
        rows[0, :count], rows[1, :count], rows[2, :count] = ids, positions, slots
        rows[:2, count:] = 0
        rows[2, count:] = self._padding_slot
        for target, row in zip((self.ids_T, self.positions_T, self.slots_T), host, strict=True):
            target.copy_(row, non_blocking=True)

    @contextlib.contextmanager
    def replaying(self, layout: BatchLayout) -> Iterator[None]:
        """Within, the decoder's forward replays the record. What is called around it stays as it is."""
        decoder = self._verifier.decoder
        num_tokens = layout.query_starts[-1]
        self.num_replays += 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._graphs[0].replay()
            for attention, graph in zip(self._attentions, self._graphs[1:], strict=True):
                attention.run(num_tokens)
                graph.replay()
            return self._output

        own = decoder.__dict__.get("forward")  # code from elsewhere may have put one there
        decoder.forward = forward
        try:
            yield
        finally:
            del decoder.forward
            if own is not None:
                decoder.forward = own


class _Memory:
    """A tensor's memory, without keeping it: the graphs own it, and use it again for later layers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}",
            "version": 2,
        }


def _borrow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
