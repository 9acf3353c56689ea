"""Norms become part of the products behind them where that is the same, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tiny_models
from layertap import LLM
from layertap.engine import compile as compiling
from layertap.engine import folded_norms, merged_mlp, rotated_products, verifier
from layertap.engine.compile import uncompile_layers
from layertap.engine.folded_norms import fold_norms
from layertap.engine.merged_mlp import merge_gate_and_up
from layertap.engine.rotated_products import fuse_rotations
from layertap.engine.row_scale import row_scale, share_row_scales

PROMPTS = [[3, 5, 7, 11, 2, 9], [8, 1, 4]]


@pytest.fixture(autouse=True)
def folding(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are folded, too."""

    class Taken:
        takes = staticmethod(lambda weight: True)

    for module in (folded_norms, merged_mlp):
        monkeypatch.setattr(module, "fused_products", Taken)


def load(name: str, folder: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A tiny model whose norms have weights, and a copy of it."""
    path = str(tiny_models.build(name, folder, torch.float32))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.weight.data += torch.rand(module.weight.shape, generator=generator) - 0.5
    model = model.to(dtype)
    return model, copy.deepcopy(model)


def fold(model: Any) -> int:
    decoder = model.get_decoder()
    merge_gate_and_up(decoder.layers)
    return fold_norms(decoder, decoder.layers, 100)


def states(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        return torch.stack(model.get_decoder()(ids, output_hidden_states=True, use_cache=False).hidden_states)


@pytest.mark.parametrize(
    ("name", "a_layer"),
    [
        ("llama", 2),
        ("qwen3", 2),
        ("mistral", 2),
        ("granite", 2),
        ("qwen2", 1),  # its attention has biases
        ("qwen3_moe", 1),  # its other norm goes to a router and to experts
        ("gemma3", 0),  # weights are added to one
        ("olmo2", 0),  # norms come behind
        ("cohere2", 0),  # layer norms, with means
    ],
)
def test_models_give_the_same(name: str, a_layer: int, tmp_path: Any) -> None:
    model, plain = load(name, tmp_path)
    assert fold(model) == a_layer * len(plain.get_decoder().layers if a_layer else [])
    torch.testing.assert_close(states(model), states(plain), rtol=1e-4, atol=1e-4)


def test_weights_are_those_of_both(tmp_path: Any) -> None:
    model, plain = load("llama", tmp_path)
    fold(model)
    mine, theirs = (m.get_decoder().layers[1] for m in (model, plain))
    expected = theirs.self_attn.k_proj.weight * theirs.input_layernorm.weight
    assert torch.equal(mine.self_attn.k_proj.weight, expected)
    expected = theirs.mlp.up_proj.weight * theirs.post_attention_layernorm.weight
    assert torch.equal(mine.mlp.gate_up_weight[1::2], expected)
    assert torch.equal(mine.mlp.down_proj.weight, theirs.mlp.down_proj.weight)


def test_rounding_is_as_good_as_before(tmp_path: Any) -> None:
    """In bfloat16, against the same weights in float32."""
    model, plain = load("qwen3", tmp_path, torch.bfloat16)
    exact = states(copy.deepcopy(plain).float())[-2]

    def off_by(got: torch.Tensor) -> float:
        return float((got[-2].float() - exact).norm() / exact.norm())

    before = off_by(states(plain))
    assert fold(model) > 0
    assert off_by(states(model)) < 1.3 * before


def test_float16_is_left_alone(tmp_path: Any) -> None:
    model, _ = load("llama", tmp_path, torch.float16)
    assert fold(model) == 0


def test_a_layer_that_gives_something_else_stays_as_it_was(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = load("llama", tmp_path)
    merge_gate_and_up(plain.get_decoder().layers)
    monkeypatch.setattr(folded_norms, "_close", lambda got, expected: False)
    assert fold(model) == 0
    assert torch.equal(states(model), states(plain))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not any("norm_eps" in vars(module) for module in model.modules())


def test_weights_that_others_use_too_are_left_alone(tmp_path: Any) -> None:
    model, plain = load("llama", tmp_path)
    for m in (model, plain):
        layers = m.get_decoder().layers
        layers[2].self_attn.v_proj.weight = layers[1].self_attn.v_proj.weight
    assert fold(model) == 2 * len(layers) - 2
    torch.testing.assert_close(states(model), states(plain), rtol=1e-4, atol=1e-4)


Use = Callable[[Any, torch.Tensor], Any]


class Layer(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(16, 1e-6), *(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        used = self.use(self, self.norm(x))
        return (x + used[0], *used[1:]) if isinstance(used, tuple) else x + used


class Decoder(nn.Module):
    def __init__(self, use: Use, num_layers: int = 1) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList([Layer(use) for _ in range(num_layers)])
        self.end: Any = nn.Identity()

    def forward(self, input_ids: torch.Tensor, use_cache: bool, position_ids: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        out: torch.Tensor = self.end(x)
        return out


def build(use: Use, num_layers: int = 1) -> Decoder:
    decoder = Decoder(use, num_layers).requires_grad_(False)
    for layer in decoder.layers:
        layer.norm.weight.data.uniform_(0.5, 1.5)
    return decoder


def folds(decoder: Decoder) -> int:
    """How many are folded, and that the decoder gives what it gave."""
    ids = torch.arange(20)[None]
    before = decoder(ids, False, None)
    count = fold_norms(decoder, decoder.layers, 50)
    torch.testing.assert_close(decoder(ids, False, None), before)
    return count


def keep(layer: Any, n: torch.Tensor) -> torch.Tensor:
    layer.kept = n
    out: torch.Tensor = layer.a(n)
    return out


class InPlace(Layer):
    """Its second product would see the input, which has changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        n = self.norm(y)
        y += self.a(n)
        y += self.b(n)
        return y


class Keyword(Layer):
    class Norm(nn.RMSNorm):
        def forward(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
            return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.a(self.norm(x, residual=None))
        return out


def test_a_norm_of_several_layers_is_left_alone() -> None:
    decoder = build(lambda layer, n: layer.a(n), 3)
    decoder.layers[1].norm = decoder.layers[2].norm = decoder.layers[0].norm
    assert folds(decoder) == 0
    decoder = build(lambda layer, n: layer.a(n), 2)
    decoder.end = decoder.layers[1].norm
    assert folds(decoder) == 1


def test_what_leaves_the_layer_is_left_alone() -> None:
    assert folds(build(lambda layer, n: (layer.a(n), n), 2)) == 0
    assert folds(build(lambda layer, n: (layer.a(n), {"normed": [n]}), 2)) == 0
    assert folds(build(keep, 2)) == 0


def test_weights_that_multiply_something_else_too_are_left_alone() -> None:
    assert folds(build(lambda layer, n: layer.a(n) + layer.a(n.detach() * 0 + 1))) == 0
    assert folds(build(lambda layer, n: layer.a(n) + layer.a(layer.b.weight[:1]))) == 0
    assert folds(build(lambda layer, n: layer.a(n) * layer.a.weight.sum())) == 0


def test_inputs_that_change_are_left_alone() -> None:
    decoder = build(lambda layer, n: n)
    for kind in (InPlace, Keyword):
        decoder.layers[0] = kind(lambda layer, n: n).requires_grad_(False)
        if kind is Keyword:
            decoder.layers[0].norm = Keyword.Norm(16, 1e-6).requires_grad_(False)
        decoder.layers[0].norm.weight.data.uniform_(0.5, 1.5)
        assert folds(decoder) == 0


def test_where_memory_is_short_a_norm_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build(lambda layer, n: layer.a(n) + layer.b(n), 3)
    split, calls = torch.split, []

    def short(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:  # in the second layer, between its two products
            raise torch.OutOfMemoryError("CUDA out of memory")
        return split(*args)

    monkeypatch.setattr("layertap.engine.folded_norms.torch.split", short)
    folds(decoder)
    assert "norm_eps" in vars(decoder.layers[0].a)
    for layer in decoder.layers[1:]:
        assert not any("norm_eps" in vars(part) or "forward" in vars(part) for part in layer.modules())


def test_nothing_runs_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_norms.fused_products, "takes", lambda weight: False)
    decoder = build(lambda layer, n: layer.a(n))
    monkeypatch.setattr(Decoder, "forward", None)
    assert fold_norms(decoder, decoder.layers, 50) == 0


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda layer, n: layer.a(n) + layer.b(n), 1),
        (lambda layer, n: layer.a(n).view(n.shape) * torch.sigmoid(layer.b(n)), 1),
        (lambda layer, n: layer.a(n) + n, 0),
        (lambda layer, n: layer.a(n.view(-1, 16)).view(n.shape), 0),
        (lambda layer, n: layer.a(n) * n.mean(), 0),
        (lambda layer, n: layer.a(torch.cat([n, n]))[:1], 0),
        (lambda layer, n: F.linear(n, layer.a.weight.T), 0),
        (lambda layer, n: F.linear(n, layer.a.weight), 0),
        (lambda layer, n: F.linear(n, layer.a.weight, layer.a.weight[0]), 0),
        (lambda layer, n: layer.a(n) + layer.a(n), 0),
        (lambda layer, n: layer.a(n.mul_(2)), 0),
        (lambda layer, n: n, 0),
    ],
)
def test_only_what_becomes_products_and_nothing_else_is_folded(use: Use, expected: int) -> None:
    assert folds(build(use)) == expected


@pytest.mark.parametrize(
    ("name", "scales", "roots", "turned"), [("llama", 2, 2, 2), ("qwen3", 2, 4, 2), ("qwen2", 1, 2, 0)]
)
def test_compiled_layers_find_each_scale_once(
    name: str,
    scales: int,
    roots: int,
    turned: int,
    make_llm: Callable[..., LLM],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model = load(name, tmp_path)
    model.save_pretrained(tmp_path)
    options = {"layers": [0, 1, 2], "skip_tokenizer_init": True}
    plain = list(make_llm(str(tmp_path), **options).extract(PROMPTS))
    plan_attention = verifier.plan_attention

    def fold_and_plan(decoder: Any, *rest: Any) -> Any:  # elsewhere done on a GPU only
        merge_gate_and_up(decoder.layers)
        assert fold_norms(decoder, decoder.layers, 100) == scales * len(decoder.layers)
        return plan_attention(decoder, *rest)

    monkeypatch.setattr(verifier, "plan_attention", fold_and_plan)
    seen: list[list[str]] = []

    def kept(graph: Any) -> int:
        count = share_row_scales(graph)
        graph.lint()
        assert count == scales
        seen.append([str(node.target) for node in graph.nodes])
        return count

    def rotated(graph: Any) -> int:
        count = fuse_rotations(graph)
        target = torch.ops.layertap.rotated_product.default
        factors = [node.args[2] for node in graph.nodes if node.target is target]
        assert count == len(factors) == turned
        assert all(factor is not None for factor in factors)
        return count

    monkeypatch.setattr(compiling, "share_row_scales", kept)
    monkeypatch.setattr(compiling, "fuse_rotations", rotated)
    monkeypatch.setattr(rotated_products, "rotates", lambda *arguments: True)
    torch._dynamo.reset()
    for got, expected in zip(
        make_llm(str(tmp_path), enforce_eager=False, **options).extract(PROMPTS), plain, strict=True
    ):
        torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-4, atol=1e-4)
    assert seen
    for targets in seen:
        assert not any("row_scale" in target for target in targets)
        assert sum("rsqrt" in target for target in targets) == roots
        # The rows of the MLP come from the attention's product.
        assert sum("product_plus_squares" in target for target in targets) == 1


def test_layers_that_are_not_compiled_after_all_stay_folded(tmp_path: Any) -> None:
    model, plain = load("llama", tmp_path)
    assert fold(model) > 0
    layers = model.get_decoder().layers
    for layer in layers:
        layer.forward = None  # as compiled
    uncompile_layers(layers)
    torch.testing.assert_close(states(model), states(plain), rtol=1e-4, atol=1e-4)


def test_rows_that_change_in_between_have_another_scale() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        first = torch.ops.layertap.row_scale(y, 1e-6)
        y.mul_(3).add_(1)
        return first + torch.ops.layertap.row_scale(y, 1e-6) + torch.ops.layertap.row_scale(y, 1e-2)

    counts = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(share_row_scales(graph.graph))
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    assert counts == [3]
    torch._dynamo.reset()


def test_operators_give_what_the_formulas_give() -> None:
    x, gate, up = torch.randn(2, 7, 24), torch.randn(16, 24), torch.randn(16, 24)
    scale = row_scale(x, 1e-6)
    torch.testing.assert_close(scale[..., None] * x, F.rms_norm(x, (24,), eps=1e-6))
    normed = F.rms_norm(x, (24,), eps=1e-6)
    torch.testing.assert_close(
        torch.ops.layertap.scaled_product(x, gate, scale), F.linear(normed, gate), rtol=1e-4, atol=1e-5
    )
    weight = torch.stack([gate, up], dim=1).flatten(0, 1)
    torch.testing.assert_close(
        torch.ops.layertap.gated_product(x, weight, scale),
        F.silu(F.linear(normed, gate)) * F.linear(normed, up),
        rtol=1e-4,
        atol=1e-5,
    )
    residual, wide = torch.randn(2, 7, 600), torch.randn(600, 24)
    out, squares = torch.ops.layertap.product_plus_squares(x, wide, residual)
    torch.testing.assert_close(out, residual + F.linear(x, wide))
    assert squares.shape == (2, 7, 3)
    torch.testing.assert_close(squares.sum(-1), out.pow(2).sum(-1))
