"""Products that do what follows them in the same kernel: as operators, and where they are put.

Shapes: T tokens, H hidden size, I intermediate size, N columns of a result.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from layertap.kernels.trial import agree
from layertap.kernels.triton_support import has_triton

LEAST_ROWS = 128
"""A tile of the kernels. For fewer tokens PyTorch's products do the work."""
_HOPPER = (9, 0)
_ADDITIONS: tuple[Callable[..., Any], ...] = (operator.add, torch.add)

_library: Any = torch.library.Library("layertap", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("gated_product(Tensor x, Tensor weight) -> Tensor")
_library.define("product_plus(Tensor x, Tensor weight, Tensor residual) -> Tensor")


def takes(weight: torch.Tensor) -> bool:
    """Whether there are kernels for a product with these weights [N, H], on this GPU."""
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 8 == 0
        and _kernels_work(weight.device, weight.dtype)
    )


@functools.cache
def _kernels_work(device: torch.device, dtype: torch.dtype) -> bool:
    """The GPU is one that they are made for, and they give what PyTorch gives. Asked once."""
    if torch.cuda.get_device_capability(device) != _HOPPER or not has_triton(device):
        return False
    generator = torch.Generator(device=device).manual_seed(0)
    x, weight, residual = (
        torch.randn(*shape, device=device, generator=generator).to(dtype)
        for shape in ((LEAST_ROWS + 8, 64), (272, 64), (LEAST_ROWS + 8, 272))
    )

    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        from layertap.kernels import fused_product

        gate, up = F.linear(x, weight).float().view(len(x), -1, 2).unbind(-1)
        return [
            (fused_product.gated_product(x, weight), F.silu(gate) * up),
            (fused_product.product_plus(x, weight, residual), F.linear(x, weight).float() + residual),
        ]

    return agree("fused products", pairs)


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``

    Args:
        x: [..., H]
        weight: [2 I, H]; even rows are the gate's, odd ones the up projection's.

    Returns:
        [..., I]
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] >= LEAST_ROWS and takes(weight):
        from layertap.kernels import fused_product

        out = fused_product.gated_product(rows.contiguous(), weight)
    else:
        gate, up = F.linear(rows, weight).view(rows.shape[0], -1, 2).unbind(-1)
        out = F.silu(gate) * up
    return out.view(*x.shape[:-1], out.shape[-1])


def product_plus(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``residual + x @ weight.T``

    Args:
        x: [..., H]
        weight: [N, H]
        residual: [..., N]

    Returns:
        [..., N]
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] >= LEAST_ROWS and takes(weight):
        from layertap.kernels import fused_product

        residual_TN = residual.reshape(rows.shape[0], -1).contiguous()
        return fused_product.product_plus(rows.contiguous(), weight, residual_TN).view(residual.shape)
    return (residual + F.linear(x, weight)).contiguous()


def _gated_shape(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _plus_shape(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual.new_empty(residual.shape)


for _key in ("CPU", "CUDA"):
    _library.impl("gated_product", gated_product, _key)
    _library.impl("product_plus", product_plus, _key)
torch.library.register_fake("layertap::gated_product", _gated_shape, lib=_library)
torch.library.register_fake("layertap::product_plus", _plus_shape, lib=_library)


def fuse_residuals(graph: fx.Graph) -> int:
    """Let products add what is added to them and nothing else done with. Returns how many there were.

    Args:
        graph: as ``torch.compile`` traces it, with an example of each value; changed in place.
    """
    return sum(_fuse_residual(graph, node) for node in list(graph.nodes))


def _fuse_residual(graph: fx.Graph, product: fx.Node) -> bool:
    if product.op != "call_function" or product.target is not F.linear or product.kwargs:
        return False
    x, weight, bias = (*product.args, None)[:3]
    if bias is not None or len(product.users) != 1:
        return False
    addition = next(iter(product.users))
    if addition is not product.next:
        return False  # what stands between may change x in place, and the product would be taken later
    if addition.op != "call_function" or addition.target not in _ADDITIONS or addition.kwargs:
        return False
    if len(addition.args) != 2:
        return False
    first, second = addition.args
    residual = second if first is product else first
    if not isinstance(residual, fx.Node) or residual is product:
        return False
    result, added, weights = (_example(node) for node in (product, residual, weight))
    if result is None or added is None or weights is None:
        return False
    if added.shape != result.shape or added.dtype != result.dtype or not takes(weights):
        return False
    with graph.inserting_before(addition):
        fused = graph.call_function(torch.ops.layertap.product_plus.default, (x, weight, residual))
    fused.meta.update(addition.meta)
    addition.replace_all_uses_with(fused)
    graph.erase_node(addition)
    graph.erase_node(product)
    return True


def _example(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
