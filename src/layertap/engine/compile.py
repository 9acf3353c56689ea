"""Decoder layers compiled with ``torch.compile``: one graph for all of them, with dynamic shapes.

A layer's weights are inputs of the graph, and attention is an opaque operator that finds its caches through
the layer that runs now; so nothing in the graph belongs to one layer, and a model of any depth compiles once
for each kind of layer.
"""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layertap.config import EngineConfig
from layertap.engine.attention import AttentionLayer
from layertap.engine.fused_products import fuse_residuals, takes
from layertap.engine.fused_rope import fuse_rope, rope_works
from layertap.engine.loader import first_line
from layertap.engine.operators import register
from layertap.engine.rotated_products import fuse_rotations
from layertap.engine.row_scale import share_row_scales
from layertap.engine.start_phases import StartPhases
from layertap.engine.step_graph import recording

if TYPE_CHECKING:
    from layertap.engine.runner import ModelRunner

logger = logging.getLogger("layertap")

_WRAPPERS = ("transformers.utils.deprecation", "transformers.modeling_layers")


class _Active(threading.local):
    layer: AttentionLayer | None = None


_active = _Active()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    layer = _active.layer
    assert layer is not None
    step = recording()
    return layer(query, key, value) if step is None else step.attend(layer, query, key, value)


def _attention_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


register("attention(Tensor query, Tensor key, Tensor value) -> Tensor", _attention, _attention_shape)


def attention_of(layer: nn.Module) -> AttentionLayer | None:
    """The one attention layer inside a decoder layer; None if it has none or several."""
    found = [
        a for m in layer.modules() if isinstance(a := m.__dict__.get("layertap_attention"), AttentionLayer)
    ]
    return found[0] if len(found) == 1 else None


def wants_compiled(config: EngineConfig, device: torch.device) -> bool:
    """Whether layers are to be compiled; on a GPU full steps are recorded then, too."""
    return config.enforce_eager is False or (config.enforce_eager is None and device.type == "cuda")


def compile_runner(runner: ModelRunner, config: EngineConfig, phases: StartPhases) -> bool:
    """Compile the decoder layers where that is wanted and works, and run them once; whether it was done."""
    layers = runner.verifier.layers
    wanted = wants_compiled(config, runner.device)
    if not wanted or not runner.verifier.packed or not compile_layers(layers):
        return False
    budget = config.max_num_batched_tokens
    assert budget is not None
    runner.least_tokens = 2
    try:
        # Where operators take numbers of a layer, such as a norm's eps, those are constants: as inputs they
        # would have everything compiled a second time.
        with torch._dynamo.config.patch(specialize_float=_fuses(layers)):
            runner.warm_up(budget, with_logits=not config.extract_only)
    except Exception as e:  # noqa: BLE001 - no compiler, or one that fails: Triton's errors have no common base
        logger.warning("layers run uncompiled: %s: %s", type(e).__name__, first_line(e))
        uncompile_layers(layers)
        runner.least_tokens = 1
        return False
    phases.end("compilation")
    if runner.device.type == "cuda":
        _record(runner, budget)
        phases.end("recording")
    return True


def _record(runner: ModelRunner, num_tokens: int) -> None:
    try:
        runner.record(num_tokens)
    except (RuntimeError, AssertionError) as e:  # the latter: an attention that runs outside a compiled layer
        logger.warning(
            "steps are launched kernel by kernel but for %d recorded sizes: %s",
            len(runner.recorded.graphs),
            first_line(e),
        )


def compile_layers(layers: nn.ModuleList) -> bool:
    """Make every decoder layer run compiled. Compilation itself happens at the first forward.

    Returns:
        False, with nothing changed, if the layers have no common shape to compile.
    """
    if any(attention_of(layer) is None for layer in layers):
        return False
    fuses = _fuses(layers)
    backend = _compile_fused if fuses else "inductor"
    kinds: dict[type[nn.Module], Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        attention = attention_of(layer)
        if fuses and attention is not None:
            weight = next(layer.parameters())
            rope_works(weight.device, weight.dtype, attention.key_dim)
        if kind not in kinds:
            kinds[kind] = torch.compile(_plain(kind.forward), dynamic=True, backend=backend)
        for part in layer.modules():
            plain = _plain(type(part).forward)
            if plain is not type(part).forward and "forward" not in vars(part):
                part.forward = types.MethodType(plain, part)
        layer.forward = _bound(kinds[kind], layer)
    return True


def _fuses(layers: nn.ModuleList) -> bool:
    return any(takes(weight) for weight in layers.parameters())


def _compile_fused(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    passes = (fuse_residuals, share_row_scales, fuse_rope, fuse_rotations)
    if sum(fuse(graph.graph) for fuse in passes):
        graph.recompile()
    return compile_fx(graph, inputs)


def _bound(compiled: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    attention = attention_of(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        _active.layer = attention
        return compiled(layer, *args, **kwargs)

    return forward


def uncompile_layers(layers: nn.ModuleList) -> None:
    """Back to the layers' own forward. Their parts run as before without what compiling took away."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward without the wrappers that translate deprecated argument names, or recompute for training:
    they break the graph."""
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"] in _WRAPPERS:
        function = function.__wrapped__
    return function
