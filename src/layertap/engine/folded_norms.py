"""Norms before products, as part of the products.

``linear(norm(x))`` is ``s * linear(x)``, with the norm's weights multiplied into the columns of the linear
layer's, once, and ``s`` a number for each row. Rounding differs, and is no more: what was rounded are numbers
in the rows, now they are weights. A norm then reads rows and writes nothing; where the product before it made
the rows, it does not even read them (``row_scale``). On an H200 that is 0.8 % of the time of a layer of
Qwen3-8B.
"""

from __future__ import annotations

import logging
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from layertap.engine import fused_products
from layertap.engine.fused_products import LEAST_ROWS
from layertap.engine.merged_mlp import fused_forward
from layertap.engine.plan import position_arguments
from layertap.engine.row_scale import row_scale
from layertap.engine.self_check import difference

logger = logging.getLogger("layertap")

_TOLERANCE = {torch.float32: 1e-4}
_ROUNDING = 2e-2  # of half precision
_EPS = ("variance_epsilon", "eps", "epsilon")
_ROWS_AT_ONCE = 4096


@dataclass(slots=True)
class _Norm:
    """A norm that ran, and what was done with its output."""

    module: Any
    eps: float
    out: torch.Tensor
    products: list[Any] = field(default_factory=list)
    """Modules that multiply it by weights of theirs."""
    foldable: bool = True
    """Nothing else has been done with it."""

    def weights(self) -> list[nn.Parameter]:
        return [_weight_of(product) for product in self.products]


@torch.inference_mode()
def fold_norms(decoder: nn.Module, layers: nn.ModuleList, vocab_size: int) -> int:
    """Fold every norm of which nothing but products is made. Returns how many there were.

    Which those are is seen in a forward over a few tokens; and each layer gives what it gave before, or stays
    as it was.
    """
    weight = next(decoder.parameters())
    if weight.dtype == torch.float16:
        return 0  # small weights times small ones may be too small for it
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (1, LEAST_ROWS), generator=generator).to(weight.device)
    uses = Counter(id(parameter) for _, parameter in decoder.named_parameters(remove_duplicate=False))
    positions = torch.arange(LEAST_ROWS, device=weight.device)[None]
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def note(*call: Any) -> None:
        calls.append(call)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        decoder(input_ids=ids, use_cache=False, **position_arguments(decoder, positions))
    except Exception as error:  # noqa: BLE001 - a model that takes something else; it runs as it is
        logger.debug("norms are not folded: %s: %s", type(error).__name__, error)
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    return sum(_fold_layer(layer, args, kwargs, uses) for layer, args, kwargs in calls)


def _fold_layer(layer: nn.Module, args: Any, kwargs: Any, uses: Counter[int]) -> int:
    def run() -> torch.Tensor:
        out = layer(*args, **kwargs)
        states = out[0] if isinstance(out, tuple) else out
        assert isinstance(states, torch.Tensor)
        return states[0]

    with _Watch(layer) as watch:
        expected = run()
    folded = 0
    for norm in watch.norms:
        weights = norm.weights()
        if not norm.foldable or not weights or any(uses[id(weight)] != 1 for weight in weights):
            continue
        before = _fold(norm)
        if difference(run(), expected) <= _TOLERANCE.get(expected.dtype, _ROUNDING):
            folded += 1
        else:
            _unfold(norm, before)
    return folded


def _fold(norm: _Norm) -> list[torch.Tensor]:
    """Returns the weights that the products had."""
    before = [weight.clone() for weight in norm.weights()]
    factors = norm.module.weight.float()
    for product, weight in zip(norm.products, norm.weights(), strict=True):
        for rows in torch.split(weight.data, _ROWS_AT_ONCE):
            rows.copy_(rows.float() * factors)
        product.norm_eps = norm.eps
        forward = _gated_forward if _is_gated(product) else _linear_forward
        product.forward = types.MethodType(forward, product)
    norm.module.forward = types.MethodType(_nothing, norm.module)
    return before


def _unfold(norm: _Norm, before: list[torch.Tensor]) -> None:
    for product, weight, old in zip(norm.products, norm.weights(), before, strict=True):
        weight.data.copy_(old)
        del product.norm_eps
        if _is_gated(product):
            product.forward = types.MethodType(fused_forward, product)
        else:
            del product.forward
    del norm.module.forward


def _nothing(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states


def _linear_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    scale = torch.ops.layertap.row_scale(x, self.norm_eps)
    out: torch.Tensor = torch.ops.layertap.scaled_product(x, self.weight, scale)
    return out


def _gated_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    scale = torch.ops.layertap.row_scale(hidden_states, self.norm_eps)
    gated = torch.ops.layertap.gated_product(hidden_states, self.gate_up_weight, scale)
    out: torch.Tensor = self.down_proj(gated)
    return out


def _is_gated(module: Any) -> bool:
    return "gate_up_weight" in module._parameters


def _weight_of(product: Any) -> nn.Parameter:
    weight = product.gate_up_weight if _is_gated(product) else product.weight
    assert isinstance(weight, nn.Parameter)
    return weight


_GATED_PRODUCTS = (torch.ops.layertap.gated_product, torch.ops.layertap.gated_product.default)
_LOOKS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "is_cuda", "ndim", "requires_grad")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel}
"""What only looks at a tensor's form."""


class _Watch(TorchFunctionMode):
    """Sees what is done with the outputs of norms while a layer runs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norms: list[_Norm] = []
        self._products: dict[int, Any] = {}
        """Modules by the weights that they multiply by."""
        self._hooks = []
        for module in layer.modules():
            if _may_be_norm(module):
                self._hooks.append(module.register_forward_hook(self._ran))
            elif _may_take_scale(module):
                self._products[id(_weight_of(module))] = module

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _ran(self, module: Any, args: Any, out: Any) -> None:
        with torch._C.DisableTorchFunction():
            eps = _eps_of(module)
            if eps is not None and len(args) == 1 and _is_normed(module, args[0], out, eps):
                self.norms.append(_Norm(module, eps, out))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKS:
            for norm in self.norms:
                if _holds(norm.out, args) or _holds(norm.out, kwargs.values()):
                    self._note(norm, func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, norm: _Norm, func: Any, args: Any, kwargs: Any) -> None:
        product = None
        if len(args) >= 2 and args[0] is norm.out and not kwargs and all(a is None for a in args[2:]):
            product = self._products.get(id(args[1]))
        called = _GATED_PRODUCTS if product is not None and _is_gated(product) else (F.linear,)
        if product is not None and func in called and product not in norm.products:
            norm.products.append(product)
        else:
            norm.foldable = False


def _holds(tensor: torch.Tensor, values: Any) -> bool:
    return any(
        value is tensor or (isinstance(value, tuple | list) and _holds(tensor, value)) for value in values
    )


def _may_be_norm(module: Any) -> bool:
    parameters: dict[str, Any] = module._parameters
    weight = parameters.get("weight")
    return len(parameters) == 1 and weight is not None and weight.dim() == 1 and not module._modules


def _may_take_scale(module: Any) -> bool:
    if _is_gated(module):
        forward = getattr(module.forward, "__func__", None)
        return forward is fused_forward and fused_products.takes(module.gate_up_weight)
    if type(module) is not nn.Linear or module._parameters.get("bias") is not None:
        return False
    if "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    return fused_products.takes(module.weight)


def _eps_of(norm: Any) -> float | None:
    found = [value for name in _EPS if isinstance(value := getattr(norm, name, None), float)]
    return found[0] if len(found) == 1 else None


def _is_normed(norm: Any, x: Any, out: Any, eps: float) -> bool:
    """Whether the output is ``x * row_scale(x) * weight``, but for rounding."""
    if not isinstance(x, torch.Tensor) or not isinstance(out, torch.Tensor) or out.shape != x.shape:
        return False
    if out.dtype != x.dtype or x.shape[-1:] != norm.weight.shape or out is x:
        return False
    expected = x.float() * row_scale(x, eps)[..., None] * norm.weight.float()
    return bool(torch.allclose(out.float(), expected, rtol=_ROUNDING, atol=1e-6))
