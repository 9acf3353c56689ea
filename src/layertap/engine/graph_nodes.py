"""What the passes over a layer's graph ask of a node."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_IN_PLACE = {
    getattr(operator, name)
    for name in (
        "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imod", "imul", "imatmul", "ior", "ipow",
        "irshift", "isub", "itruediv", "ixor", "setitem", "delitem",
    )
}  # fmt: skip


def may_write(node: fx.Node) -> bool:
    """Whether it may change a tensor in place. Of what is not known it may."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op != "call_function":
        return node.op == "call_module"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(overload._schema.is_mutable for overload in _overloads(target))
    if isinstance(target, torch._ops.HigherOrderOperator) or target in _IN_PLACE:
        return True
    name = getattr(target, "__name__", "_")
    if name.endswith("_") or name in ("batch_norm", "instance_norm") or node.kwargs.get("out") is not None:
        return True
    # An argument "inplace" that is given, by name or by place.
    functional = getattr(target, "__module__", "") == "torch.nn.functional"
    return bool(node.kwargs.get("inplace")) or (functional and any(a is True for a in node.args))


def _overloads(packet: Any) -> Iterator[Any]:
    return (getattr(packet, name) for name in packet.overloads())


def written_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether a node behind the first and before the last may change a tensor in place."""
    node = first.next
    while node is not last:
        if may_write(node):
            return True
        node = node.next
    return False


def example(node: Any) -> torch.Tensor | None:
    """The tensor that stands for a node's value, if it is one."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
