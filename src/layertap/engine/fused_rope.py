"""The rotary embedding, with the norm of heads before it where there is one, as one operator: and where it is
put.

Shapes: 1 a batch of one, T tokens, N heads, D their size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from layertap.engine.graph_nodes import example, may_write
from layertap.engine.operators import register
from layertap.kernels.trial import agree
from layertap.kernels.triton_support import use_triton

_LARGEST = 256
_PRODUCTS: tuple[Callable[..., Any], ...] = (operator.mul, torch.mul)
_SUMS: tuple[Callable[..., Any], ...] = (operator.add, torch.add)
_OPPOSITES: tuple[Callable[..., Any], ...] = (operator.neg, torch.neg)


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """``r * cos + rotate_half(r) * sin`` with ``r = rms_norm(x) * weight``, or ``r = x`` without a weight.

    Args:
        x: [1, T, N, D]
        weight: [D]
        cos: [1, T, D]; ``sin`` alike.

    Returns:
        [1, T, N, D], contiguous.
    """
    if use_triton(x):
        from layertap.kernels import norm_rope as kernel

        return kernel.norm_rope(_rows(x), weight, _rows(cos), _rows(sin), eps)
    return _formula(x, weight, cos, sin, eps)


def _formula(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    r = x.float()
    if weight is not None:
        r = r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    a, b = r.chunk(2, dim=-1)
    rotated = torch.cat((-b, a), dim=-1)
    return (r * cos.float().unsqueeze(2) + rotated * sin.float().unsqueeze(2)).to(x.dtype).contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@functools.cache
def rope_works(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """The operator gives what the formula gives, on this device and for this size of a head. Tried once:
    best before anything is being compiled."""
    with unset_fake_temporarily():
        generator = torch.Generator(device=device).manual_seed(0)
        x, weight, cos, sin = (
            torch.randn(*shape, device=device, generator=generator).to(dtype)
            for shape in ((1, 5, 3, size), (size,), (1, 5, size), (1, 5, size))
        )
        return agree(
            "fused rotary embeddings",
            lambda: [
                (norm_rope(x, w, cos, sin, 1e-6), _formula(x, w, cos, sin, 1e-6)) for w in (weight, None)
            ],
        )


register(
    "norm_rope(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps) -> Tensor", norm_rope, _shape
)


@dataclass(frozen=True, slots=True)
class _Found:
    x: fx.Node
    weight: fx.Node | None
    eps: Any
    cos: fx.Node
    sin: fx.Node


def fuse_rope(graph: fx.Graph) -> int:
    """Let queries and keys be normalised and rotated by one operator each. Returns how many there were.

    Args:
        graph: as ``torch.compile`` traces it, with an example of each value; changed in place.
    """
    count = 0
    for node in list(graph.nodes):
        found = _find(node)
        if found is None:
            continue
        inner = _between(node, found)
        nodes = list(graph.nodes)
        first = min(nodes.index(n) for n in inner)
        if any(may_write(n) for n in nodes[first : nodes.index(node)]):
            continue  # what was read early would be read late
        heads = example(found.x)
        assert heads is not None
        if not rope_works(heads.device, heads.dtype, int(heads.shape[3])):
            continue
        with graph.inserting_before(node):
            arguments = (found.x, found.weight, found.cos, found.sin, found.eps)
            fused = graph.call_function(torch.ops.layertap.norm_rope.default, arguments)
            turned = graph.call_method("transpose", (fused, 1, 2))
        fused.meta.update(found.x.meta)
        turned.meta.update(node.meta)
        node.replace_all_uses_with(turned)
        for n in sorted(inner, key=nodes.index, reverse=True):
            if not n.users:
                graph.erase_node(n)
        count += 1
    return count


def _between(node: fx.Node, found: _Found) -> set[fx.Node]:
    """What computes the node from the inputs of the formula, itself included."""
    leaves = (found.x, found.cos, found.sin, found.weight, found.eps)
    inner: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        n = waiting.pop()
        if n not in inner and n not in leaves:
            inner.add(n)
            waiting.extend(n.all_input_nodes)
    return inner


def _find(node: fx.Node) -> _Found | None:
    """``t * cos + rotate_half(t) * sin``, with ``t`` the heads as they are or normalised."""
    straight, turned = _pair(node, _SUMS)
    t, cos = _pair(straight, _PRODUCTS)
    cat, sin = _pair(turned, _PRODUCTS)
    size = _size(t)
    if t is None or cos is None or sin is None or cat is None or size is None:
        return None
    if not _is_rotated(cat, t, size):
        return None
    heads = _method(t, "transpose", 1, 2)
    cos, sin = _method(cos, "unsqueeze", 1), _method(sin, "unsqueeze", 1)
    if heads is None or cos is None or sin is None or not _fits(cos, heads) or not _fits(sin, heads):
        return None
    normed = _normed(heads)
    x, weight, eps = (heads, None, 0.0) if normed is None else normed
    return _Found(x, weight, eps, cos, sin)


def _is_rotated(cat: fx.Node, t: fx.Node, size: int) -> bool:
    """Whether it is the second half of t, negated, before the first."""
    if cat.target is not torch.cat or len(cat.args) + len(cat.kwargs) != 2:
        return False
    parts = cat.args[0] if cat.args else None
    if (cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim")) != -1:
        return False
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        return False
    negated, first = parts
    if not isinstance(negated, fx.Node) or negated.target not in _OPPOSITES or len(negated.args) != 1:
        return False
    half = size // 2
    return _is_slice(first, t, slice(None, half, None)) and _is_slice(
        negated.args[0], t, slice(half, None, None)
    )


def _is_slice(node: Any, of: fx.Node, part: slice) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is operator.getitem
        and node.args[0] is of
        and node.args[1] == (Ellipsis, part)
    )


def _normed(node: fx.Node) -> tuple[fx.Node, fx.Node, Any] | None:
    """``weight * (x.float() * rsqrt(mean(x.float() ** 2) + eps)).to(x.dtype)``: x, weight and eps."""
    weight, rounded = _pair(node, _PRODUCTS)
    scaled = _cast(rounded)
    if weight is None or scaled is None:
        return None
    wide, root = _pair(scaled, _PRODUCTS)
    x = _cast(wide)
    if wide is None or root is None or x is None or root.target is not torch.rsqrt:
        return None
    heads, scale, in_float = example(x), example(weight), example(wide)
    if heads is None or scale is None or in_float is None:
        return None
    if in_float.dtype != torch.float32 or _dtype(rounded) != heads.dtype:
        return None
    if scale.shape != heads.shape[-1:] or _dtype(node) != heads.dtype:
        return None
    added = root.args[0] if len(root.args) == 1 else None
    if not isinstance(added, fx.Node) or added.target not in _SUMS or len(added.args) != 2 or added.kwargs:
        return None
    mean, eps = added.args
    if example(eps) is not None or not isinstance(eps, float | fx.Node):
        return None  # a tensor: not one number
    square = _method(mean, "mean", -1, keepdim=True)
    if square is None or _method(square, "pow", 2) is not wide:
        return None
    return x, weight, eps


def _pair(node: Any, targets: tuple[Callable[..., Any], ...]) -> tuple[fx.Node | None, fx.Node | None]:
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in targets:
        return None, None
    if len(node.args) != 2 or node.kwargs:
        return None, None
    first, second = node.args
    both = isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return (first, second) if both else (None, None)  # type: ignore[return-value]


def _method(node: Any, name: str, *args: Any, **kwargs: Any) -> fx.Node | None:
    """What the method is called on, if the node is such a call."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != name:
        return None
    of = node.args[0]
    same = node.args[1:] == args and dict(node.kwargs) == kwargs
    return of if same and isinstance(of, fx.Node) else None


def _cast(node: Any) -> fx.Node | None:
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != "to":
        return None
    of = node.args[0]
    plain = len(node.args) == 2 and isinstance(node.args[1], torch.dtype) and not node.kwargs
    return of if plain and isinstance(of, fx.Node) else None


def _fits(angles: fx.Node, heads: fx.Node) -> bool:
    """Whether cosines (or sines) are those of these heads, [1, T, D] and [1, T, N, D], of one dtype."""
    a, h = example(angles), example(heads)
    if a is None or h is None or a.dim() != 3 or h.dim() != 4:
        return False
    return a.dtype == h.dtype and (*a.shape[:2], a.shape[2]) == (*h.shape[:2], h.shape[3])


def _size(node: fx.Node | None) -> int | None:
    """D of heads [1, N, T, D] that the kernel takes."""
    value = example(node)
    if value is None or value.dim() != 4 or value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if value.shape[0] != 1 or not isinstance(value.shape[3], int):
        return None
    size = value.shape[3]
    return size if 2 <= size <= _LARGEST and size & (size - 1) == 0 else None


def _dtype(node: Any) -> torch.dtype | None:
    value = example(node)
    return None if value is None else value.dtype
