"""Products that normalise and rotate their heads: what the operator gives, and where it is put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from layertap.engine import rotated_products
from layertap.engine.fused_rope import fuse_rope
from layertap.engine.rotated_products import fuse_rotations, rotates


@pytest.fixture
def rotating(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a kernel for heads of every size, too; other operators do the work."""
    monkeypatch.setattr(rotated_products, "rotates", lambda *args: True)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    t = heads.transpose(1, 2)
    return (t * cos.unsqueeze(1)) + (rotate_half(t) * sin.unsqueeze(1))


def normed(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    wide = heads.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return norm * wide.to(torch.float32)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_the_operator_gives_what_the_formula_gives(scaled: bool, with_norm: bool) -> None:
    x, weight = torch.randn(1, 6, 12), torch.randn(24, 12)
    scale = torch.rand(1, 6) + 0.5 if scaled else None
    norm = torch.randn(8) if with_norm else None
    cos, sin = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    got = torch.ops.layertap.rotated_product(x, weight, scale, norm, cos, sin, 1e-6)
    heads = F.linear(x, weight) * (1 if scale is None else scale[..., None])
    heads = heads.view(1, 6, 3, 8)
    expected = rope(heads if norm is None else normed(heads, norm), cos, sin).transpose(1, 2)
    torch.testing.assert_close(got, expected)
    shape = rotated_products._shape(x, weight, scale, norm, cos, sin, 1e-6)
    assert shape.shape == got.shape
    assert shape.dtype == got.dtype
    assert got.is_contiguous()


def test_nothing_is_rotated_without_such_a_gpu() -> None:
    assert not rotates(torch.device("cpu"), torch.bfloat16, 128, True)


@pytest.mark.parametrize(("name", "expected"), [("llama", 2), ("qwen3", 2), ("gemma3", 0), ("gpt_oss", 0)])
def test_fused_layers_give_what_the_model_gives(
    name: str,
    expected: int,
    compiled_gives_the_same: Callable[[str], None],
    counts_of: Callable[[str], list[int]],
    rotating: None,
) -> None:
    counts = counts_of("fuse_rotations")
    compiled_gives_the_same(name)
    assert counts
    assert set(counts) == {expected}


def heads_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w).view(1, 5, -1, 8)


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scale = torch.ops.layertap.row_scale(x, 1e-6)
    return torch.ops.layertap.scaled_product(x, w, scale)


def used_elsewhere(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    product = F.linear(x, w)
    return rope(product.view(1, 5, -1, 8), cos, sin) + product.sum()


def heads_elsewhere(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = heads_of(x, w)
    return rope(heads, cos, sin) + heads.sum()


def with_bias(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rope(F.linear(x, w, w[:, 0]).view(1, 5, -1, 8), cos, sin)


def changed_between(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    product = F.linear(x, w)
    x.mul_(2)
    return rope(product.view(1, 5, -1, 8), cos, sin) + x.sum()


def part_of_it(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rope(F.linear(x, w)[..., :16].view(1, 5, -1, 8), cos, sin)


def other_rows(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rope(F.linear(x[:, :4], w[:20]).view(1, 5, -1, 8), cos, sin)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w, cos, sin: rope(heads_of(x, w), cos, sin), 1),
        (lambda x, w, cos, sin: rope(F.linear(x, w).reshape(1, 5, 3, 8), cos, sin), 1),
        (lambda x, w, cos, sin: rope(scaled(x, w).view(1, 5, 3, 8), cos, sin), 1),
        (lambda x, w, cos, sin: rope(normed(heads_of(x, w), w[0, :8]), cos, sin), 1),
        (lambda x, w, cos, sin: rope(heads_of(x, w) * 2, cos, sin), 0),
        (lambda x, w, cos, sin: rope(x.view(1, 5, -1, 8), cos, sin), 0),
        (used_elsewhere, 0),
        (heads_elsewhere, 0),
        (with_bias, 0),
        (changed_between, 0),
        (part_of_it, 0),
        (other_rows, 0),
    ],
)
def test_only_heads_that_are_nothing_but_rotated_are_fused(
    function: Callable[..., torch.Tensor], expected: int, rotating: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, cos, sin = (
        torch.randn(*shape, generator=generator) for shape in ((1, 5, 16), (24, 16), (1, 5, 8), (1, 5, 8))
    )
    wanted = function(x, w, cos, sin)
    counts: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        fuse_rope(graph.graph)
        counts.append(fuse_rotations(graph.graph))
        graph.graph.lint()
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    got = torch.compile(function, backend=backend, dynamic=False)(x, w, cos, sin)
    torch._dynamo.reset()
    torch.testing.assert_close(got, wanted)
    assert sum(counts) == expected
