"""Norm and rotary embedding as one operator: what it gives, and where it is put into a compiled layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layertap.engine import compile as compiling
from layertap.engine.fused_rope import fuse_rope


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", 2), ("qwen3", 2), ("qwen3_moe", 2), ("gemma3", 0), ("gpt_oss", 0)]
)
def test_fused_layers_give_what_the_model_gives(
    name: str,
    expected: int,
    compiled_gives_the_same: Callable[[str], None],
    counts_of: Callable[[str], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gemma3 turns heads before it normalises them; gpt_oss rotates in another way."""
    counts = counts_of("fuse_rope")
    monkeypatch.setattr(compiling, "takes", lambda weight: True)
    monkeypatch.setattr(compiling, "fuse_residuals", lambda graph: 0)
    compiled_gives_the_same(name)
    # Mixture-of-experts layers are several graphs, of which one has the attention.
    assert max(counts) == expected
    if name in ("llama", "qwen3"):
        assert len(counts) == 1, "compiled once"


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    t = x.transpose(1, 2)
    return (t * cos.unsqueeze(1)) + (rotate_half(t) * sin.unsqueeze(1))


def normed(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return rope(weight * wide.to(torch.float32), cos, sin)


def other_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    t = x.transpose(1, 2)
    return (t * cos.unsqueeze(1)) + (torch.cat((t[..., 4:], -t[..., :4]), dim=-1) * sin.unsqueeze(1))


def part_of_a_head(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rope(x[..., :8], cos, sin)


def changed_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    t = x.transpose(1, 2)
    straight = t * cos.unsqueeze(1)
    rotated = rotate_half(t)
    x.add_(1)
    return straight + (rotated * sin.unsqueeze(1))


def changed_by_a_function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    t = x.transpose(1, 2)
    straight = t * cos.unsqueeze(1)
    rotated = rotate_half(t)
    torch.nn.functional.silu(x, inplace=True)
    return straight + (rotated * sin.unsqueeze(1))


def changed_before(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 3
    return rope(x, cos, sin) + x.sum()


def many_scales(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + cos.abs().mean(-1)[..., None, None])
    return rope(weight * wide.to(torch.float32), cos, sin)


def used_elsewhere(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    t = x.transpose(1, 2)
    angles = cos.unsqueeze(1)
    return (t * angles) + (rotate_half(t) * sin.unsqueeze(1)) + angles.sum() + t.amax()


def another_norm(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + 1e-6)
    return rope(weight * wide.to(torch.float32), cos, sin)


@pytest.mark.parametrize(
    ("function", "size", "expected", "normalised"),
    [
        (rope, 8, 1, False),
        (normed, 8, 1, True),
        (other_halves, 8, 0, False),
        (part_of_a_head, 16, 1, False),
        (changed_in_place, 8, 0, False),
        (another_norm, 8, 1, False),
        (changed_by_a_function, 8, 0, False),
        (changed_before, 8, 1, False),
        (many_scales, 8, 1, False),
        (used_elsewhere, 8, 1, False),
    ],
)
def test_only_the_formula_is_taken_for_the_formula(
    function: Callable[..., torch.Tensor], size: int, expected: int, normalised: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 3, size, generator=generator)
    cos, sin, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 5, 8), (1, 5, 8), (8,)))
    takes_weight = function in (normed, another_norm, many_scales)
    arguments = (weight, cos, sin) if takes_weight else (cos, sin)
    wanted = function(x.clone(), *arguments)
    counts: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        counts.append(fuse_rope(graph.graph))
        graph.recompile()
        operators = [n for n in graph.graph.nodes if "norm_rope" in str(n.target)]
        assert all((n.args[1] is not None) == normalised for n in operators)
        return graph.forward

    torch._dynamo.reset()
    got = torch.compile(function, backend=backend, dynamic=False)(x.clone(), *arguments)
    torch.testing.assert_close(got, wanted)
    assert counts == [expected]
