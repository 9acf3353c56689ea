"""Attention over a flat batch of tokens and a paged KV cache, behind ``transformers``' attention interface.

Shape suffixes: 1 a batch of one, T tokens of the step, n tokens of one sequence in the step, m tokens of that
sequence so far (context + n), Q query heads, K key/value heads, D key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from layertap.engine import cpu_attention
from layertap.kernels.triton_support import use_triton

IMPLEMENTATION = "layertap"

# Scores of one query block are materialised where no fused kernel does the job: at most this many elements
# at a time.
_MAX_SCORE_ELEMENTS = 1 << 25


@dataclass(slots=True)
class BatchLayout:
    """Where the tokens of one step lie: in the flat batch, and in the cache. Sequences follow one another."""

    slot_mapping: torch.Tensor
    """[T] int64: the cache slot (block * block_size + offset) of each token."""
    query_starts: list[int]
    """First flat index of each sequence, and T at the end."""
    context_lens: list[int]
    """Tokens of each sequence that earlier steps (or other requests with the same prefix) have put into the
    cache."""
    slots: list[torch.Tensor | None]
    """For each sequence with a context: [m] int64, the slots of all its tokens in order; None where there is
    none."""
    cu_seqlens_q: torch.Tensor | None = None
    """[S + 1] int32 on the device: ``query_starts``; for the variable-length kernel."""
    cu_seqlens_k: torch.Tensor | None = None
    """[S + 1] int32 on the device: cumulative m."""
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    all_slots: torch.Tensor | None = None
    """[sum of m] int64: every token of every sequence, in order; None when no sequence has a context."""
    keep_kv: bool = True
    """Whether a later step may read this step's keys and values: only then need they be stored."""
    arrays: cpu_attention.StepArrays | None = None
    """The same for the CPU kernel; made by the first layer that needs it."""


@dataclass(slots=True)
class StepState:
    """What all attention layers of one model share: the layout of the step that runs now."""

    layout: BatchLayout | None = None


@dataclass(slots=True, eq=False)
class AttentionLayer:
    """One attention module's rules and its part of the KV cache."""

    step: StepState
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    """A query sees this many tokens, itself included; None sees all."""
    softcap: float | None = None
    """Scores are ``softcap * tanh(score / softcap)``."""
    sinks: torch.Tensor | None = None
    """[Q] one more logit for each head, that takes part in the softmax and has no value."""
    key_cache: torch.Tensor | None = field(default=None, repr=False)
    """[slots, K, D]"""
    value_cache: torch.Tensor | None = field(default=None, repr=False)
    """[slots, K, V]"""
    native: bool = True
    """Whether the CPU kernel may be used, where it is there."""

    def bytes_per_token(self, itemsize: int) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (num_slots, self.num_kv_heads)
        self.key_cache = torch.zeros(*shape, self.key_dim, dtype=dtype, device=device)
        self.value_cache = torch.zeros(*shape, self.value_dim, dtype=dtype, device=device)

    def __call__(
        self,
        q_1QTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTV: torch.Tensor,
        out_1TQV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend. Returns [1, T, Q, V], in ``out_1TQV`` if it is
        given."""
        out = self._run(q_1QTD, k_1KTD, v_1KTV, out_1TQV)
        if out_1TQV is None:
            return out
        if out.data_ptr() != out_1TQV.data_ptr():  # the kernel could not put it there
            out_1TQV.copy_(out)
        return out_1TQV

    def _run(
        self,
        q_1QTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTV: torch.Tensor,
        out_1TQV: torch.Tensor | None,
    ) -> torch.Tensor:
        layout = self.step.layout
        assert layout is not None
        assert self.key_cache is not None
        assert self.value_cache is not None
        if cpu_attention.supports(self, q_1QTD):
            return cpu_attention.attend(self, layout, q_1QTD, k_1KTD, v_1KTV)
        if layout.keep_kv:
            # Every sequence's keys go in before any is read: sequences of one step may share blocks.
            self._store(k_1KTD[0].transpose(0, 1), v_1KTV[0].transpose(0, 1), layout.slot_mapping)
        if self._varlen(q_1QTD):
            return self._attend_varlen(layout, q_1QTD, k_1KTD, v_1KTV, out_1TQV)
        return self.attend_each(layout, q_1QTD, k_1KTD, v_1KTV)

    def _store(self, k_TKD: torch.Tensor, v_TKV: torch.Tensor, slots_T: torch.Tensor) -> None:
        assert self.key_cache is not None
        assert self.value_cache is not None
        if use_triton(k_TKD):
            from layertap.kernels.paged_copy import store_keys_values

            store_keys_values(k_TKD, v_TKV, self.key_cache, self.value_cache, slots_T)
        else:
            self.key_cache.index_copy_(0, slots_T, k_TKD)
            self.value_cache.index_copy_(0, slots_T, v_TKV)

    def _load(self, slots_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.key_cache is not None
        assert self.value_cache is not None
        if use_triton(slots_M):
            from layertap.kernels.paged_copy import load_keys_values

            return load_keys_values(self.key_cache, self.value_cache, slots_M)
        return self.key_cache[slots_M], self.value_cache[slots_M]

    def _varlen(self, q: torch.Tensor) -> bool:
        return (
            q.is_cuda
            and q.dtype in (torch.float16, torch.bfloat16)
            and self.softcap is None
            and self.sinks is None
            and self.key_dim == self.value_dim
            and self.key_dim <= 256
            and self.key_dim % 8 == 0
        )

    def _attend_varlen(
        self,
        layout: BatchLayout,
        q_1QTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTV: torch.Tensor,
        out_1TQV: torch.Tensor | None,
    ) -> torch.Tensor:
        from layertap.engine.varlen import varlen_attention

        assert layout.cu_seqlens_q is not None
        assert layout.cu_seqlens_k is not None
        k, v = k_1KTD[0].transpose(0, 1), v_1KTV[0].transpose(0, 1)
        if layout.all_slots is not None:
            k, v = self._load(layout.all_slots)
        out = varlen_attention(
            q_1QTD[0].transpose(0, 1), k, v, layout.cu_seqlens_q, layout.cu_seqlens_k,
            layout.max_seqlen_q, layout.max_seqlen_k, self.scale, self.window,
            None if out_1TQV is None else out_1TQV[0],
        )  # fmt: skip
        return out.unsqueeze(0)

    def attend_each(
        self, layout: BatchLayout, q_1QTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTV: torch.Tensor
    ) -> torch.Tensor:
        """Attention sequence by sequence, through PyTorch. Returns [1, T, Q, V]."""
        _, heads, tokens, _ = q_1QTD.shape
        out = q_1QTD.new_empty(1, tokens, heads, self.value_dim)
        starts = layout.query_starts
        for i, context in enumerate(layout.context_lens):
            start, end = starts[i], starts[i + 1]
            if context == 0:
                k, v = k_1KTD[:, :, start:end], v_1KTV[:, :, start:end]
            else:
                slots = layout.slots[i]
                assert slots is not None
                assert self.key_cache is not None
                assert self.value_cache is not None
                k = self.key_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
                v = self.value_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            o = self.attend(q_1QTD[:, :, start:end], k, v)
            out[:, start:end] = o.transpose(1, 2)
        return out

    def attend(self, q_1QnD: torch.Tensor, k_1KmD: torch.Tensor, v_1KmV: torch.Tensor) -> torch.Tensor:
        """Causal attention of a sequence's last n tokens to its m tokens. Returns [1, Q, n, V]."""
        n, m = q_1QnD.shape[2], k_1KmD.shape[2]
        plain = self.softcap is None and self.sinks is None
        gqa = q_1QnD.shape[1] != k_1KmD.shape[1]
        if plain and n == m and (self.window is None or m <= self.window) and self.key_dim == self.value_dim:
            return F.scaled_dot_product_attention(
                q_1QnD, k_1KmD, v_1KmV, is_causal=n > 1, scale=self.scale, enable_gqa=gqa
            )
        block = max(16, min(1024, _MAX_SCORE_ELEMENTS // (m * (1 if plain else q_1QnD.shape[1]))))
        outs = []
        for first in range(0, n, block):
            q = q_1QnD[:, :, first : first + block]
            begin = m - n + first  # position of the block's first query
            end = begin + q.shape[2]
            low = 0 if self.window is None else max(0, begin - self.window + 1)
            positions = torch.arange(begin, end, device=q.device)[:, None]
            keys = torch.arange(low, end, device=q.device)[None]
            mask = keys <= positions
            if self.window is not None:
                mask &= keys > positions - self.window
            k, v = k_1KmD[:, :, low:end], v_1KmV[:, :, low:end]
            if plain:
                outs.append(
                    F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=gqa)
                )
            else:
                outs.append(self._attend_scores(q, k, v, mask))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _attend_scores(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.float().masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.float().view(1, -1, 1, 1).expand(1, scores.shape[1], scores.shape[2], 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        return torch.matmul(weights.to(v.dtype), v)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The entry that ``transformers`` calls: query [1, Q, T, D], key [1, K, T, D], value [1, K, T, V] -> [1,
    T, Q, V].

    What the keyword arguments say was learned once, at start, by :mod:`layertap.engine.plan`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.layertap.attention(query, key, value), None
    layer: AttentionLayer = module.layertap_attention  # type: ignore[assignment]
    return layer(query, key, value), None


def register() -> None:
    """Make ``attn_implementation="layertap"`` known to ``transformers``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # No mask function goes with it: models then build no mask at all.
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
