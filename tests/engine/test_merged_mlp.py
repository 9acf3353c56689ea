"""Gate and up projections become one product where that is the same, and only there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tiny_models
from layertap import LLM
from layertap.engine import verifier
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


class Limited(Odd):
    """As in DeepSeek-V4, GLM-5 and Step-3.7: only large numbers tell it from a plain one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=7)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x).clamp(min=-7, max=7))


class Precise(Odd):
    """As in Beam: the product is rounded once, not three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated = self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(activated.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mlps_with_limits_are_left_alone(dtype: torch.dtype) -> None:
    assert merge_gate_and_up(nn.ModuleList([Limited().to(dtype)])) == 0


def test_mlps_with_another_precision_are_left_alone() -> None:
    assert merge_gate_and_up(nn.ModuleList([Precise().bfloat16()])) == 0


class Quantised(torch.Tensor):
    """A tensor of another kind, as torchao's: what is not written for it fails."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.cat:
            raise NotImplementedError("cat")
        return super().__torch_function__(func, types, args, kwargs or {})


class Gated(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whatever_the_dtype_a_gated_mlp_is_merged(dtype: torch.dtype) -> None:
    assert merge_gate_and_up(nn.ModuleList([Gated().to(dtype)])) == 1


def test_quantised_weights_are_left_alone() -> None:
    mlp = Gated().requires_grad_(False)
    for part in (mlp.gate_proj, mlp.up_proj):
        part.weight = nn.Parameter(part.weight.as_subclass(Quantised), requires_grad=False)
    assert merge_gate_and_up(nn.ModuleList([mlp])) == 0


def test_where_memory_is_short_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("layertap.engine.merged_mlp.torch.cat", cat)
    mlp = Gated()
    assert merge_gate_and_up(nn.ModuleList([mlp])) == 0
    assert not hasattr(mlp, "gate_up_weight")


def test_a_closed_engine_lets_go_of_merged_weights_at_once(
    make_llm: Callable[..., LLM], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_attention = verifier.plan_attention

    def merge_and_plan(decoder: Any, *rest: Any) -> Any:  # elsewhere done on a GPU only
        assert merge_gate_and_up(decoder.layers) > 0
        return plan_attention(decoder, *rest)

    monkeypatch.setattr(verifier, "plan_attention", merge_and_plan)
    llm = make_llm(tiny("llama"), layers=[1])
    list(llm.extract([[1, 2, 3]]))
    gone = weakref.ref(llm._core.verifier.layers[0].mlp)
    gc.disable()
    try:
        llm.close()
        assert gone() is None
    finally:
        gc.enable()
