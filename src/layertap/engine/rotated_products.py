"""Products whose heads are normalised and rotated before they are stored: as an operator, and where it is
put.

Shapes: 1 a batch of one, T tokens, H hidden size, N columns of a product, D size of a head, Q = N / D heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from layertap.engine import fused_products
from layertap.engine.fused_rope import norm_rope
from layertap.engine.graph_nodes import example, written_between
from layertap.engine.operators import register
from layertap.kernels.trial import agree

_COLUMNS = 384  # of what is tried: heads of any size, and part of a tile
_SCALED = (torch.ops.layertap.scaled_product, torch.ops.layertap.scaled_product.default)


def rotated_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """``norm_rope`` of the heads of ``s * (x @ weight.T)``.

    Args:
        x: [..., H], T rows in all.
        weight: [N, H]
        scale: [...] float32; None: ones.
        norm: [D]; None: heads are rotated as they are.
        cos: [1, T, D]; ``sin`` alike.

    Returns:
        [1, T, Q, D], contiguous.
    """
    size = cos.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    heads = (1, rows.shape[0], -1, size)
    least = fused_products.LEAST_ROWS
    normed = norm is not None
    if rows.shape[0] >= least and fused_products.takes(weight) and rotates(x.device, x.dtype, size, normed):
        from layertap.kernels import specialized_product as kernel

        flat = None if scale is None else scale.reshape(-1).contiguous()
        norm = None if norm is None else norm.contiguous()
        out = kernel.rotated_product(
            rows.contiguous(), weight, flat, norm, cos[0].contiguous(), sin[0].contiguous(), eps
        )
        return out.view(heads)
    product = F.linear(rows, weight) if scale is None else fused_products.scaled_product(rows, weight, scale)
    return norm_rope(product.view(heads), norm, cos, sin, eps)


def _shape(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    cos = others[2]
    return x.new_empty(*cos.shape[:2], weight.shape[0] // cos.shape[2], cos.shape[2])


register(
    "rotated_product(Tensor x, Tensor weight, Tensor? scale, Tensor? norm, Tensor cos, Tensor sin, float eps)"
    " -> Tensor",
    rotated_product,
    _shape,
)


@functools.cache
def rotates(device: torch.device, dtype: torch.dtype, size: int, normed: bool) -> bool:
    """Whether there is a kernel for heads of this size, and it gives what the operators give that it stands
    for. Tried once."""
    with unset_fake_temporarily():
        if not fused_products.specialized_works(device, dtype):
            return False
        from layertap.kernels import specialized_product as kernel

        if size not in kernel.HEAD_SIZES:
            return False

        def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
            generator = torch.Generator(device=device).manual_seed(0)
            rows = kernel.rows_of_three_turns(device)
            x, weight, norm, cos, sin = (
                torch.randn(*shape, device=device, generator=generator).to(dtype)
                for shape in ((rows, 336), (_COLUMNS, 336), (size,), (rows, size), (rows, size))
            )
            scale = torch.rand(rows, device=device, generator=generator) + 0.5
            weights = norm if normed else None
            heads = (F.linear(x.float(), weight.float()) * scale[:, None]).view(1, rows, -1, size)
            expected = norm_rope(heads, weights, cos[None], sin[None], 1e-6)
            got = kernel.rotated_product(x, weight, scale, weights, cos, sin, 1e-6)
            return [(got, expected.view(got.shape))]

        return agree("products with rotary embeddings", pairs)


def fuse_rotations(graph: fx.Graph) -> int:
    """Let products normalise and rotate their heads where nothing else is done with them. Returns how many
    there were.

    Args:
        graph: as ``torch.compile`` traces it, after ``fuse_rope``; changed in place.
    """
    targets = (torch.ops.layertap.norm_rope, torch.ops.layertap.norm_rope.default)
    return sum(_fuse(graph, node) for node in list(graph.nodes) if node.target in targets)


def _fuse(graph: fx.Graph, rotation: fx.Node) -> bool:
    heads, norm, cos, sin, eps = rotation.args
    if not isinstance(heads, fx.Node) or heads.op != "call_method" or heads.target not in ("view", "reshape"):
        return False
    product = heads.args[0]
    if not isinstance(product, fx.Node) or len(product.users) != 1 or len(heads.users) != 1:
        return False
    operands = _operands(product)
    if operands is None or written_between(product, rotation):
        return False
    x, weight, scale = operands
    weights, result, parts = example(weight), example(product), example(heads)
    if weights is None or result is None or parts is None or not fused_products.takes(weights):
        return False
    if parts.shape[:-2] != result.shape[:-1] or result.dtype != weights.dtype:
        return False
    if not rotates(weights.device, weights.dtype, int(parts.shape[-1]), norm is not None):
        return False
    with graph.inserting_before(rotation):
        arguments = (x, weight, scale, norm, cos, sin, eps)
        fused = graph.call_function(torch.ops.layertap.rotated_product.default, arguments)
    fused.meta.update(rotation.meta)
    rotation.replace_all_uses_with(fused)
    for node in (rotation, heads, product):
        graph.erase_node(node)
    return True


def _operands(product: fx.Node) -> tuple[Any, Any, Any] | None:
    """x, weight and scale of a product."""
    if product.op != "call_function" or product.kwargs:
        return None
    if product.target in _SCALED:
        x, weight, scale = product.args
        return x, weight, scale
    if product.target is F.linear and all(bias is None for bias in product.args[2:]):
        return product.args[0], product.args[1], None
    return None
