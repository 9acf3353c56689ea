"""The dummy draft model: no weights, no attention, one cache-only layer that stores aux hidden states in
paged memory.

The idea is vLLM's ``extract_hidden_states``: the states lie in blocks with the same ids as the KV cache's, so
chunked prefill, prefix caching, preemption and continuous batching need no special case.

Shapes: T tokens of a step, C cache columns (distinct tapped boundaries), H hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from layertap.kernels.triton_support import use_triton


class CacheOnlyAttention(nn.Module):
    """Keeps what it is given. ``num_heads`` is the number of tapped boundaries, ``head_size`` the hidden
    size.

    Args:
        cache: [num_blocks, block_size, C, H], in the verifier's dtype, on its device.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.columns = [cache.view(-1, cache.shape[2], cache.shape[3])[:, c] for c in range(cache.shape[2])]

    def forward(self, column: int, hidden_TH: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write one boundary's states of this step's tokens to their slots."""
        if use_triton(hidden_TH):
            from layertap.kernels.paged_copy import store_rows

            store_rows(hidden_TH, self.columns[column], slot_mapping)
        else:
            self.columns[column].index_copy_(0, slot_mapping, hidden_TH)


class DraftModel(nn.Module):
    """The draft model that receives the verifier's aux hidden states."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_columns: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        cache = torch.zeros(num_blocks, block_size, num_columns, hidden_size, dtype=dtype, device=device)
        self.attention = CacheOnlyAttention(cache)

    @property
    def kv_cache(self) -> torch.Tensor:
        """[num_blocks, block_size, C, H]"""
        return self.attention.cache

    def forward(self, column: int, hidden_TH: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.attention(column, hidden_TH, slot_mapping)
