"""Norms before products, as part of the products.

``linear(norm(x))`` is ``s * linear(x)``, with the norm's weights multiplied into the columns of the linear
layer's, once, and ``s`` a number for each row. Rounding differs, and is no more: what was rounded are numbers
in the rows, now they are weights. A norm then reads rows and writes nothing; where the product before it made
the rows, it does not even read them (``row_scale``). On an H200 that is 0.8 % of the time of a layer of
Qwen3-8B.

Which norms these are is seen while the model runs over a few tokens: of their outputs products are made, by
modules that multiply nothing else, and nothing but that happens to them.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from layertap.engine import fused_products
from layertap.engine.fused_products import LEAST_ROWS
from layertap.engine.merged_mlp import fused_forward, relative_difference
from layertap.engine.plan import position_arguments
from layertap.engine.row_scale import row_scale

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
    x: torch.Tensor
    version: int
    """Of ``x``: another one after something has changed it in place."""
    out: torch.Tensor | None
    copy: torch.Tensor
    """What ``out`` was."""
    products: list[Any] = field(default_factory=list)
    """Modules that multiply it by weights of theirs."""
    foldable: bool = True
    """Nothing else has been done with it."""

    def weights(self) -> list[nn.Parameter]:
        return [_weight_of(product) for product in self.products]


@torch.no_grad()  # and not inference_mode: the versions of tensors are asked for
def fold_norms(decoder: nn.Module, layers: nn.ModuleList, vocab_size: int) -> int:
    """Fold every norm of which nothing but products is made. Returns how many there were."""
    weight = next(decoder.parameters())
    if weight.dtype == torch.float16:
        return 0  # small weights times small ones may be too small for it
    if not any(_may_take_scale(module) for layer in layers for module in layer.modules()):
        return 0
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (1, LEAST_ROWS), generator=generator).to(weight.device)
    positions = torch.arange(LEAST_ROWS, device=weight.device)[None]
    try:
        with _Watch(decoder, layers) as watch:
            decoder(input_ids=ids, use_cache=False, **position_arguments(decoder, positions))
        return sum(_fold_checked(norm) for norm in watch.foldable())
    except Exception as error:  # noqa: BLE001 - a model that takes something else, or too little memory
        logger.debug("norms are not folded, or not all: %s: %s", type(error).__name__, error)
        return 0


def _fold_checked(norm: _Norm) -> bool:
    """Fold a norm if its products give what they gave, or leave them as they were."""
    before = [weight.clone() for weight in norm.weights()]
    expected = [_product_of(product)(norm.copy) for product in norm.products]
    ok = False
    try:
        _fold(norm)
        got = [_product_of(product)(norm.x) for product in norm.products]
        ok = all(_close(g, e) for g, e in zip(got, expected, strict=True))
    finally:
        if not ok:
            _unfold(norm, before)
    return ok


def _fold(norm: _Norm) -> None:
    factors = norm.module.weight.float()
    for product, weight in zip(norm.products, norm.weights(), strict=True):
        for rows in torch.split(weight.data, _ROWS_AT_ONCE):
            rows.copy_(rows.float() * factors)
        product.norm_eps = norm.eps
        forward = _gated_forward if _is_gated(product) else _linear_forward
        product.forward = types.MethodType(forward, product)
    norm.module.forward = types.MethodType(_nothing, norm.module)


def _unfold(norm: _Norm, before: list[torch.Tensor]) -> None:
    for product, weight, old in zip(norm.products, norm.weights(), before, strict=True):
        weight.data.copy_(old)
        vars(product).pop("norm_eps", None)
        vars(product).pop("forward", None)
        if _is_gated(product):
            product.forward = types.MethodType(fused_forward, product)
    vars(norm.module).pop("forward", None)


def _product_of(product: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a module multiplies, without what it does with that."""
    if not _is_gated(product):
        return lambda x: product.forward(x)
    eps = getattr(product, "norm_eps", None)

    def gated(x: torch.Tensor) -> torch.Tensor:
        scale = None if eps is None else row_scale(x, eps)
        out: torch.Tensor = torch.ops.layertap.gated_product(x, product.gate_up_weight, scale)
        return out

    return gated


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return relative_difference(got, expected) <= _TOLERANCE.get(expected.dtype, _ROUNDING)


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
    """Sees what is done with the outputs of norms, and with the weights of products, while a model runs."""

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self._norms: list[_Norm] = []
        self._by_output: dict[int, _Norm] = {}
        self._products: dict[int, Any] = {}
        """Modules by the weights that they multiply by."""
        self._elsewhere: set[int] = set()
        """Weights that have met something else."""
        self._running: list[Any] = []
        """Modules of products, the innermost last."""
        self._runs: Counter[int] = Counter()
        """Of each norm."""
        self._hooks: list[Any] = []
        # How often the decoder has a parameter: shared ones stay as they are.
        self._places = Counter(id(p) for _, p in decoder.named_parameters(remove_duplicate=False))
        for module in decoder.modules():
            if _may_be_norm(module):
                hook = module.register_forward_hook(self._ran, with_kwargs=True)
                self._hooks.append(hook)
        for layer in layers:
            self._hooks.append(layer.register_forward_hook(self._layer_ran))
            for module in layer.modules():
                if _may_take_scale(module):
                    self._products[id(_weight_of(module))] = module
                    self._hooks.append(module.register_forward_pre_hook(self._begins))
                    self._hooks.append(module.register_forward_hook(self._ends))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def foldable(self) -> Iterator[_Norm]:
        """The norms that may be folded. Asked once, after the run."""
        self._by_output.clear()
        for norm in self._norms:
            weights = [norm.module.weight, *norm.weights()]
            alone = all(self._places[id(weight)] == 1 for weight in weights)
            elsewhere = any(id(weight) in self._elsewhere for weight in weights)
            assert norm.out is not None
            left = weakref.ref(norm.out)
            norm.out = None
            kept = left() is not None  # somebody has it still
            once = self._runs[id(norm.module)] == 1
            if norm.foldable and norm.products and alone and once and not elsewhere and not kept:
                yield norm

    def _ran(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        with torch._C.DisableTorchFunction():
            self._runs[id(module)] += 1
            eps = _eps_of(module)
            if eps is None or len(args) != 1 or kwargs or not _is_normed(module, args[0], out, eps):
                return
            x = args[0]
            norm = _Norm(module, eps, x, x._version, out, out.clone())
            self._norms.append(norm)
            self._by_output[id(out)] = norm

    def _begins(self, module: Any, args: Any) -> None:
        self._running.append(module)

    def _ends(self, module: Any, args: Any, out: Any) -> None:
        self._running.pop()

    def _layer_ran(self, layer: Any, args: Any, out: Any) -> None:
        for tensor in _tensors(out):
            norm = self._by_output.get(id(tensor))
            if norm is not None:
                norm.foldable = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKS:
            self._see(func, args, kwargs)
        return func(*args, **kwargs)

    def _see(self, func: Any, args: Any, kwargs: Any) -> None:
        given = [*_tensors(args), *_tensors(kwargs)]
        first = args[0] if args else None
        norm = self._by_output.get(id(first))
        product = self._products.get(id(args[1])) if len(args) > 1 else None
        called = _GATED_PRODUCTS if product is not None and _is_gated(product) else (F.linear,)
        plain = not kwargs and func in called and all(a is None for a in args[2:])
        plain = plain and self._running[-1:] == [product]  # its own forward, which is to be another one
        if norm is not None and product is not None and plain and product not in norm.products:
            norm.products.append(product)
            if norm.x._version != norm.version:
                norm.foldable = False
            given = given[2:]
        for tensor in given:
            if (other := self._by_output.get(id(tensor))) is not None:
                other.foldable = False
            if id(tensor) in self._products:
                self._elsewhere.add(id(tensor))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _may_be_norm(module: Any) -> bool:
    parameters: dict[str, Any] = module._parameters
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.dim() != 1:
        return False
    return not module._modules and "forward" not in vars(module)


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
