"""Half-precision models on CPUs that have no half-precision matrix units.

There, a bfloat16 matrix product runs several times slower than a float32 one. The linear layers then keep
their weights in float32 and round their results back: same inputs, same weights, same output dtype, with
float32 accumulation as the half-precision kernels have it, too.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

from layertap.engine.memory import format_bytes, machine_memory

logger = logging.getLogger("layertap")

# The float32 weights may take this share of the machine's memory; larger models stay as they are.
_MEMORY_SHARE = 0.25


class Float32Linear(nn.Module):
    """A linear layer that computes in float32 and answers in the dtype of its input.

    Args:
        linear: the layer to stand for; it is not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        self.bias = (
            None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight, self.bias).to(x.dtype)


def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` faster than by converting them to float32."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def use_float32_matmul(layers: nn.Module, dtype: torch.dtype) -> bool:
    """Swap the linear layers of decoder layers where this CPU gains by it and has the memory for it.

    Returns:
        Whether it was done.
    """
    if has_fast_matmul(dtype):
        return False
    found = [
        (parent, name, child)
        for parent in layers.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype is dtype
    ]
    needed = 4 * sum(child.weight.numel() for _, _, child in found)
    if not found or needed > _MEMORY_SHARE * machine_memory():
        return False
    for parent, name, child in found:
        setattr(parent, name, Float32Linear(child))
    logger.info(
        "this CPU has no %s matrix units: linear layers compute in float32 (%s)", dtype, format_bytes(needed)
    )
    return True
