"""Products with what follows them: the operators, and where they are put into a compiled layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layertap.engine import merged_mlp
from layertap.engine.fused_products import fuse_residuals, takes


def test_operators_give_what_the_formulas_give() -> None:
    x, gate, up = torch.randn(2, 7, 24), torch.randn(16, 24), torch.randn(16, 24)
    weight = torch.stack([gate, up], dim=1).flatten(0, 1)
    torch.testing.assert_close(
        torch.ops.layertap.gated_product(x, weight), F.silu(F.linear(x, gate)) * F.linear(x, up)
    )
    residual = torch.randn(2, 7, 16)
    torch.testing.assert_close(
        torch.ops.layertap.product_plus(x, gate, residual), residual + F.linear(x, gate)
    )


def test_nothing_is_fused_without_such_a_gpu() -> None:
    assert not takes(torch.zeros(512, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "expected"), [("llama", 2), ("qwen3", 2), ("gemma3", 0)])
def test_fused_layers_give_what_the_model_gives(
    name: str,
    expected: int,
    compiled_gives_the_same: Callable[[str], None],
    counts_of: Callable[[str], list[int]],
    as_on_hopper: None,
) -> None:
    """gemma3 has a norm between a product and the residual."""
    counts = counts_of("fuse_residuals")
    compiled_gives_the_same(name)
    assert counts
    assert set(counts) == {expected}


def traced(function: Callable[..., Any], *args: Any) -> tuple[int, torch.Tensor]:
    """How many products were fused in a function's graph, and what it returns then."""
    counts = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(fuse_residuals(graph.graph))
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    out = torch.compile(function, backend=backend)(*args)
    torch._dynamo.reset()
    return sum(counts), out


def in_place_between(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, w)
    x.mul_(0.5)
    return r + y


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w, r, b: r + F.linear(x, w), 1),
        (lambda x, w, r, b: F.linear(x, w) + r, 1),
        (lambda x, w, r, b: F.linear(x, w) + F.linear(x, w), 1),
        (lambda x, w, r, b: r + F.linear(x, w, b), 0),
        (lambda x, w, r, b: F.linear(x, w) + b, 0),
        (lambda x, w, r, b: F.linear(x, w) + 1, 0),
        (lambda x, w, r, b: r.double() + F.linear(x, w), 0),
        (lambda x, w, r, b: torch.add(r, F.linear(x, w), alpha=2), 0),
        (lambda x, w, r, b: (p := F.linear(x, w)) + p, 0),
        (lambda x, w, r, b: (p := F.linear(x, w)) + r * p.sum(), 0),
        (lambda x, w, r, b: in_place_between(x.clone(), w, r), 0),
        (lambda x, w, r, b: r.clone().add_(F.linear(x, w)), 0),
    ],
)
def test_only_what_is_added_and_nothing_else_is_fused(
    function: Callable[..., Any], expected: int, as_on_hopper: None
) -> None:
    args = torch.randn(1, 5, 12), torch.randn(8, 12), torch.randn(1, 5, 8), torch.randn(8)
    count, out = traced(function, *args)
    assert count == expected
    torch.testing.assert_close(out, function(*args))


class Gated(nn.Module):
    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=False), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are merged as for the fused kernel, and PyTorch does the work."""

    class Taken:
        takes = staticmethod(lambda weight: True)

    monkeypatch.setattr(merged_mlp, "fused_products", Taken)


def test_merged_rows_lie_in_turns(interleaved: None) -> None:
    mlp, x = Gated(nn.SiLU()), torch.randn(2, 3, 8)
    expected, gate, up = mlp(x), mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
    assert merged_mlp.merge_gate_and_up(nn.ModuleList([mlp])) == 1
    torch.testing.assert_close(mlp(x), expected)
    assert torch.equal(mlp.gate_up_weight[::2], gate)
    assert torch.equal(mlp.up_proj.weight, up)
    assert mlp.up_proj.weight.untyped_storage().data_ptr() == mlp.gate_up_weight.untyped_storage().data_ptr()
    torch.testing.assert_close(mlp.up_proj(x), F.linear(x, up))


def test_another_activation_is_merged_without_being_fused(interleaved: None) -> None:
    mlp, x = Gated(nn.GELU(approximate="tanh")), torch.randn(2, 3, 8)
    expected, gate = mlp(x), mlp.gate_proj.weight.clone()
    assert merged_mlp.merge_gate_and_up(nn.ModuleList([mlp])) == 1
    torch.testing.assert_close(mlp(x), expected)
    assert torch.equal(mlp.gate_up_weight[:12], gate)


def test_a_kernel_that_gives_something_else_is_not_used(
    interleaved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = merged_mlp._Way(
        merged_mlp._in_turns, lambda self, x: torch.zeros_like(x), merged_mlp._FUSED.parts
    )
    monkeypatch.setattr(merged_mlp, "_FUSED", wrong)
    mlp, x = Gated(nn.SiLU()), torch.randn(2, 3, 8)
    expected = mlp(x)
    assert merged_mlp.merge_gate_and_up(nn.ModuleList([mlp])) == 1
    torch.testing.assert_close(mlp(x), expected)
