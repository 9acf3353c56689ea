"""Products that do what follows them in the same kernel: as operators, and where they are put.

Shapes: T tokens, H hidden size, I intermediate size, N columns of a result, P parts of them.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from layertap.engine.graph_nodes import example
from layertap.engine.operators import register
from layertap.kernels.trial import agree
from layertap.kernels.triton_support import has_triton

logger = logging.getLogger("layertap")

LEAST_ROWS = 128
"""A tile of the kernels. For fewer tokens PyTorch's products do the work."""
_HOPPER = (9, 0)
_TRIED = {("3", "6"), ("3", "7"), ("3", "8")}
"""Releases of Triton whose code for kernels with specialized warps was looked at."""
_PART = 256
"""Columns of a result whose squares are summed up together."""
_ADDITIONS: tuple[Callable[..., Any], ...] = (operator.add, torch.add)


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
    if not _runs_there(device):
        return False
    generator = torch.Generator(device=device).manual_seed(0)
    x, weight, residual = (
        torch.randn(*shape, device=device, generator=generator).to(dtype)
        for shape in ((LEAST_ROWS + 8, 64), (272, 64), (LEAST_ROWS + 8, 272))
    )
    scale = torch.rand(len(x), device=device, generator=generator) + 0.5

    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        from layertap.kernels import fused_product

        product = F.linear(x, weight).float()
        scaled = product * scale[:, None]
        gate, up = scaled.view(len(x), -1, 2).unbind(-1)
        of_sum = []
        if not specialized_works(device, dtype):
            of_sum = _sum_and_squares(fused_product.product_plus(x, weight, residual), product + residual)
        return [
            (fused_product.gated_product(x, weight, scale), F.silu(gate) * up),
            (fused_product.scaled_product(x, weight, scale), scaled),
            *of_sum,
        ]

    return agree("fused products", pairs)


def _runs_there(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == _HOPPER and has_triton(device)


@functools.cache
def specialized_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels with specialized warps run on this GPU, with this release of Triton, and give what
    PyTorch gives. Asked once; the others do their work where it is False."""
    if not _runs_there(device) or not _is_tried():
        return False

    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        from layertap.kernels import specialized_product

        generator = torch.Generator(device=device).manual_seed(0)
        rows = specialized_product.rows_of_three_turns(device)
        x, weight, residual = (
            torch.randn(*shape, device=device, generator=generator).to(dtype)
            for shape in ((rows, 336), (272, 336), (rows, 272))
        )
        got = specialized_product.product_plus(x, weight, residual)
        return _sum_and_squares(got, residual + F.linear(x, weight).float())

    return agree("products with specialized warps", pairs)


def _is_tried() -> bool:
    """Whether Triton is of a release that is known to make these kernels right. Another one may leave out a
    barrier, and a GPU that waits for itself cannot be told to stop."""
    import triton

    known = tuple(triton.__version__.split(".")[:2]) in _TRIED
    if not known:
        logger.info("products with specialized warps are not tried with Triton %s", triton.__version__)
    return known


def _sum_and_squares(
    got: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    total, squares = got
    parts = torch.split(total.float(), _PART, dim=1)
    return [(total, expected), (squares, torch.stack([part.pow(2).sum(1) for part in parts], 1))]


def gated_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(s * (x @ gate.T)) * (s * (x @ up.T))``

    Args:
        x: [..., H]
        weight: [2 I, H]; even rows are the gate's, odd ones the up projection's.
        scale: [...] float32; None: ones.

    Returns:
        [..., I]
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] >= LEAST_ROWS and takes(weight):
        from layertap.kernels import fused_product

        flat = None if scale is None else scale.reshape(-1).contiguous()
        out = fused_product.gated_product(rows.contiguous(), weight, flat)
    else:
        product = F.linear(rows, weight)
        if scale is not None:
            product = product * scale.reshape(-1, 1)
        gate, up = product.view(rows.shape[0], -1, 2).unbind(-1)
        out = (F.silu(gate) * up).to(x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])


def scaled_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``s * (x @ weight.T)``

    Args:
        x: [..., H]
        weight: [N, H]
        scale: [...] float32

    Returns:
        [..., N]
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] >= LEAST_ROWS and takes(weight):
        from layertap.kernels import fused_product

        out = fused_product.scaled_product(rows.contiguous(), weight, scale.reshape(-1).contiguous())
    else:
        out = (F.linear(rows, weight) * scale.reshape(-1, 1)).to(x.dtype)
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
    return _plus(x, weight, residual)[0]


def product_plus_squares(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and [..., P] float32: the sums of the squares of the result's rows, in parts."""
    out, squares = _plus(x, weight, residual)
    if squares is None:
        parts = torch.split(out.float().pow(2), _PART, dim=-1)
        squares = torch.stack([part.sum(-1) for part in parts], dim=-1)
    return out, squares.view(*out.shape[:-1], -1)


def _plus(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] >= LEAST_ROWS and takes(weight):
        if specialized_works(x.device, weight.dtype):
            from layertap.kernels.specialized_product import product_plus as kernel
        else:
            from layertap.kernels.fused_product import product_plus as kernel

        residual_TN = residual.reshape(rows.shape[0], -1).contiguous()
        out, squares = kernel(rows.contiguous(), weight, residual_TN)
        return out.view(residual.shape), squares
    return (residual + F.linear(x, weight)).contiguous(), None


def _gated_shape(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _scaled_shape(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _plus_shape(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual.new_empty(residual.shape)


def _plus_squares_shape(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = -(-weight.shape[0] // _PART)
    squares = residual.new_empty(*residual.shape[:-1], parts, dtype=torch.float32)
    return residual.new_empty(residual.shape), squares


register("gated_product(Tensor x, Tensor weight, Tensor? scale=None) -> Tensor", gated_product, _gated_shape)
register("scaled_product(Tensor x, Tensor weight, Tensor scale) -> Tensor", scaled_product, _scaled_shape)
register("product_plus(Tensor x, Tensor weight, Tensor residual) -> Tensor", product_plus, _plus_shape)
register(
    "product_plus_squares(Tensor x, Tensor weight, Tensor residual) -> (Tensor, Tensor)",
    product_plus_squares,
    _plus_squares_shape,
)


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
    result, added, weights = (example(node) for node in (product, residual, weight))
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
