"""What a norm divides each row by, as an operator: and where it comes from in a compiled layer.

Shapes: H hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from layertap.engine.graph_nodes import example, written_between
from layertap.engine.operators import register


def row_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(mean(x ** 2) + eps)`` of each row.

    Args:
        x: [..., H]

    Returns:
        [...] float32
    """
    return torch.rsqrt(x.float().pow(2).mean(-1) + eps)


def _scale_shape(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


register("row_scale(Tensor x, float eps) -> Tensor", row_scale, _scale_shape)


def share_row_scales(graph: fx.Graph) -> int:
    """Find each row's scale once, and have the product that made the rows sum up their squares where there is
    one. Returns how many scales there are.

    Args:
        graph: as ``torch.compile`` traces it, with an example of each value; changed in place.
    """
    operators = (torch.ops.layertap.row_scale, torch.ops.layertap.row_scale.default)
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in operators]
    known: list[tuple[fx.Node, fx.Node]] = []
    for node in nodes:
        same = (made for old, made in known if old.args == node.args and not written_between(old, node))
        made = next(same, None)
        if made is None:
            made = _scale(graph, node)
            known.append((node, made))
        node.replace_all_uses_with(made)
    for node in nodes:
        graph.erase_node(node)
    return len(known)


def _scale(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A node's result before the node, in operations that the compiler fuses."""
    squares = _squares(graph, node)
    x, eps = node.args
    value = example(x)
    assert value is not None
    call: Callable[..., fx.Node] = graph.call_function
    with graph.inserting_before(node):
        if squares is None:
            squares = call(torch.pow, (graph.call_method("float", (x,)), 2))
        mean = call(torch.div, (call(torch.sum, (squares, -1)), int(value.shape[-1])))
        return call(torch.rsqrt, (call(torch.add, (mean, eps)),))


def _squares(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Sums of squares of the rows from the product that made them, if one did."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if x.target is not torch.ops.layertap.product_plus.default or written_between(x, node):
        return None
    call: Callable[..., fx.Node] = graph.call_function
    with graph.inserting_before(x):
        both = call(torch.ops.layertap.product_plus_squares.default, x.args)
        out, squares = (call(operator.getitem, (both, i)) for i in range(2))
    out.meta.update(x.meta)
    x.replace_all_uses_with(out)
    graph.erase_node(x)
    return squares
