"""Gate and up projections become one product where that is the same, and only there."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import tiny_models
from layertap.engine.merged_mlp import merge_gate_and_up


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_gated_mlps_are_merged_and_give_the_same(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = str(tiny_models.build(name, tmp_path, torch.float32))
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    plain = copy.deepcopy(model)
    layers = model.get_decoder().layers
    assert merge_gate_and_up(layers) == len(layers)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    mlp = layers[0].mlp
    assert mlp.gate_proj.weight.data_ptr() == mlp.gate_up_weight.data_ptr()
    assert torch.equal(mlp.up_proj.weight, plain.get_decoder().layers[0].mlp.up_proj.weight)


class Odd(nn.Module):
    """Looks like a gated MLP and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


def test_another_formula_is_left_alone() -> None:
    odd = Odd()
    assert merge_gate_and_up(nn.ModuleList([odd])) == 0
    assert "forward" not in vars(odd)
    assert not hasattr(odd, "gate_up_weight")


def test_mlps_with_biases_are_left_alone() -> None:
    odd = Odd()
    odd.gate_proj = nn.Linear(8, 12)
    assert merge_gate_and_up(nn.ModuleList([odd])) == 0
