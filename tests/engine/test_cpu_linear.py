"""Whatever form linear layers take on a CPU, they compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layertap.engine import cpu_linear
from layertap.engine.cpu_linear import Float32Linear, PackedLinear, release_linear_layers, suit_linear_layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_packed_layer_equals_the_plain_one(bias: bool, rows: int) -> None:
    linear = nn.Linear(48, 32, bias=bias)
    x = torch.randn(1, rows, 48)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        assert torch.allclose(packed(x), linear(x), atol=1e-5)
    packed.release()


def test_numbers_of_released_weights_are_used_again() -> None:
    first = PackedLinear(nn.Linear(8, 8))
    second = PackedLinear(nn.Linear(8, 8))
    number = first._number
    release_linear_layers(nn.ModuleList([first]))
    third = PackedLinear(nn.Linear(8, 8))
    assert third._number == number != second._number
    release_linear_layers(nn.ModuleList([second, third]))
    assert not cpu_linear._packed


@pytest.mark.parametrize("bias", [True, False])
def test_a_float32_product_rounds_to_the_same_bfloat16(bias: bool) -> None:
    linear = nn.Linear(64, 32, bias=bias).bfloat16()
    x = torch.randn(7, 64).bfloat16()
    with torch.inference_mode():
        exact = nn.functional.linear(
            x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
        )
        got = Float32Linear(linear)(x)
    assert got.dtype is torch.bfloat16
    assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-6)


def test_without_matrix_units_layers_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_fast_matmul", lambda dtype: False)
    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()).bfloat16() for _ in range(2)])
    assert suit_linear_layers(layers, torch.bfloat16) == "float32"
    assert all(isinstance(layer[0], Float32Linear) for layer in layers)


def test_a_model_too_large_for_float32_copies_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_fast_matmul", lambda dtype: False)
    monkeypatch.setattr(cpu_linear, "machine_memory", lambda: 100)
    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)).bfloat16()])
    assert suit_linear_layers(layers, torch.bfloat16) == "plain"
    assert type(layers[0][0]) is nn.Linear


def test_float32_models_are_left_alone() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])
    assert suit_linear_layers(layers, torch.float32) == "plain"
