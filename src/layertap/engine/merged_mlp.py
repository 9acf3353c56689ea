"""Gate and up projection of a gated MLP as one product.

On an H200 the product of both of Qwen3-8B's (16,384 x 4,096 by 4,096 x 24,576) runs at 682 TFLOP/s where two
of half the size run at 665; smaller models gain nothing and lose nothing. Where a kernel does the activation,
too (``fused_products``), the rows of both lie in turns: a gate and its up projection then meet in one thread.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from layertap.engine import fused_products
from layertap.engine.fused_products import LEAST_ROWS

_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
_ROWS = 5
_SILU = ("SiLU", "SiLUActivation")  # PyTorch's and transformers'
_SCALES = (1.0, 64.0, 4096.0)  # of what an MLP is tried with: some limit large numbers, and only those


def merge_gate_and_up(layers: nn.ModuleList) -> int:
    """Merge the projections of every MLP that is ``down(act(gate(x)) * up(x))``. Returns how many there were.

    Whether an MLP is that is found out by running it. Its parts keep their weights, as views.
    """
    return sum(_merge(mlp) for layer in layers for mlp in layer.modules() if _may_be_gated(mlp))


def _may_be_gated(mlp: Any) -> bool:
    gate, up = getattr(mlp, "gate_proj", None), getattr(mlp, "up_proj", None)
    if type(gate) is not nn.Linear or type(up) is not nn.Linear:
        return False
    if getattr(gate, "bias", None) is not None or getattr(up, "bias", None) is not None:
        return False
    if type(gate.weight) is not nn.Parameter or type(up.weight) is not nn.Parameter:
        return False  # quantised: a tensor of another kind
    if not callable(getattr(mlp, "down_proj", None)) or not callable(getattr(mlp, "act_fn", None)):
        return False
    return gate.weight.shape == up.weight.shape and gate.weight.dtype == up.weight.dtype


def _one_below_the_other(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat([gate, up])


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(hidden_states, self.gate_up_weight).chunk(2, dim=-1)
    out: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
    return out


def _in_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def fused_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Of an MLP whose activation the product does."""
    out: torch.Tensor = self.down_proj(torch.ops.layertap.gated_product(hidden_states, self.gate_up_weight))
    return out


@dataclass(frozen=True, slots=True)
class _Way:
    merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    forward: Callable[[Any, torch.Tensor], torch.Tensor]
    parts: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """Views of gate and up in what was merged."""


_PLAIN = _Way(_one_below_the_other, _forward, lambda merged: merged.chunk(2))
_FUSED = _Way(_in_turns, fused_forward, lambda merged: (merged[0::2], merged[1::2]))


@torch.inference_mode()
def _merge(mlp: Any) -> bool:
    weight = mlp.gate_proj.weight
    generator = torch.Generator(device=weight.device).manual_seed(0)
    x = torch.randn(1, LEAST_ROWS, weight.shape[1], device=weight.device, generator=generator)
    try:
        if not all(_is_gated(mlp, (x[:, :_ROWS] * scale).to(weight.dtype)) for scale in _SCALES):
            return False
        hidden = x.to(weight.dtype)
        expected = mlp(hidden)
    except Exception:  # noqa: BLE001 - it takes more than hidden states: another kind
        return False
    fused = type(mlp.act_fn).__name__ in _SILU and fused_products.takes(weight)
    return (fused and _merge_as(_FUSED, mlp, hidden, expected)) or _merge_as(_PLAIN, mlp, hidden, expected)


def _merge_as(way: _Way, mlp: Any, hidden: torch.Tensor, expected: torch.Tensor) -> bool:
    with torch.inference_mode(False):
        try:
            merged = way.merge(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())
        except torch.OutOfMemoryError:
            return False  # there is room for the model, but not for a part of it twice
        mlp.gate_up_weight = nn.Parameter(merged, requires_grad=False)
        if not _close(way.forward(mlp, hidden), expected):
            del mlp.gate_up_weight
            return False
        for part, weight in zip((mlp.gate_proj, mlp.up_proj), way.parts(merged), strict=True):
            part.weight = nn.Parameter(weight, requires_grad=False)
    mlp.forward = types.MethodType(way.forward, mlp)
    return True


def _is_gated(mlp: Any, x: torch.Tensor) -> bool:
    """Whether an MLP gives what the formula gives, bit for bit: the products are the same here. A limit or
    another precision in between is told apart by that."""
    got = mlp(x)
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return bool(torch.isclose(got, expected, rtol=0, atol=0, equal_nan=True).all())


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return relative_difference(got, expected) <= _TOLERANCE.get(expected.dtype, 1e-2)


def relative_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of what is got from what is expected; NaN where either has one."""
    return float((got - expected).float().norm() / expected.float().norm().clamp(min=1e-30))
