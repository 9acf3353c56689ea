"""Linear layers on CPUs, in the form that suits the processor.

With half-precision matrix units (AMX, AVX512-BF16) the weights are laid out once in the order that oneDNN's
kernels read them in, instead of at every call. Without, a bfloat16 product runs several times slower than a
float32 one: there the weights are kept in float32 and results are rounded back. Either way inputs, weights
and output dtype are the same, and products are accumulated in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from layertap.engine.memory import format_bytes, machine_memory
from layertap.engine.operators import register

logger = logging.getLogger("layertap")

# Float32 copies of the weights may take this share of the machine's memory; larger models stay as they are.
_MEMORY_SHARE = 0.25
# The row count that packed weights are laid out for; they work for any other, too.
_PACK_ROWS = 2048

# Packed weights are no ordinary tensors and cannot go through a compiled graph: the graph holds their number.
_packed: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}


def _packed_linear(x: torch.Tensor, index: torch.Tensor, out_features: int) -> torch.Tensor:
    weight, bias = _packed[int(index.item())]
    result = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    assert isinstance(result, torch.Tensor)
    return result


def _packed_linear_shape(x: torch.Tensor, index: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


register(
    "packed_linear(Tensor x, Tensor index, int out_features) -> Tensor",
    _packed_linear,
    _packed_linear_shape,
    devices=("CPU",),
)


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the order that the matrix kernels read.

    Args:
        linear: the layer to stand for; it is not kept.

    Raises:
        RuntimeError: this processor has no kernel for the weight's dtype.
    """

    index: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACK_ROWS)
        self._number = next(i for i in range(len(_packed) + 1) if i not in _packed)
        _packed[self._number] = (weight, None if linear.bias is None else linear.bias.detach())
        self.register_buffer("index", torch.tensor(self._number), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.ops.layertap.packed_linear(x, self.index, self.out_features)
        assert isinstance(result, torch.Tensor)
        return result

    def release(self) -> None:
        """Drop the packed weight."""
        _packed.pop(self._number, None)


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


def suit_linear_layers(layers: nn.Module, dtype: torch.dtype) -> str:
    """Put the linear layers of decoder layers into the form that suits this CPU.

    Returns:
        ``"packed"``, ``"float32"``, or ``"plain"`` where they were left alone.
    """
    found = [
        (parent, name, child)
        for parent in layers.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype is dtype
    ]
    if dtype not in (torch.bfloat16, torch.float16) or not found:
        return "plain"
    if has_fast_matmul(dtype):
        return "packed" if _swap(found, PackedLinear) else "plain"
    needed = 4 * sum(child.weight.numel() for _, _, child in found)
    if needed > _MEMORY_SHARE * machine_memory():
        return "plain"
    logger.info(
        "this CPU has no %s matrix units: linear layers compute in float32 (%s)", dtype, format_bytes(needed)
    )
    return "float32" if _swap(found, Float32Linear) else "plain"


def _swap(found: list[tuple[nn.Module, str, nn.Linear]], build: Callable[[nn.Linear], nn.Module]) -> bool:
    for parent, name, child in found:
        try:
            setattr(parent, name, build(child))
        except RuntimeError as e:  # a shape or dtype that the library has no kernel for
            logger.info("a linear layer stays as it is (%s)", e)
            return False
    return True


def release_linear_layers(layers: nn.Module) -> None:
    """Drop packed weights that a model no longer needs."""
    for module in layers.modules():
        if isinstance(module, PackedLinear):
            module.release()
