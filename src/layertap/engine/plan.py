"""How a model attends, learned from the model itself.

One small forward runs with an attention implementation and a mask implementation of ours. The mask
implementation is given the model's own mask as a function of positions; evaluating it over the whole context
length tells whether it is causal, or causal with a sliding window, or something else. The attention
implementation is given everything a layer passes. What is not understood makes the model run sequence by
sequence instead: slower, never wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layertap.engine.attention import AttentionLayer, StepState, register

PLANNING = "layertap_planning"
_PLAN_TOKENS = 13

# What attention layers pass on and that does not change the scores beyond what is read below.
_UNDERSTOOD = {
    "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids",
    "position_embeddings", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
    "return_dict", "logits_to_keep",
    "output_router_logits",
}  # fmt: skip


class NotPacked(Exception):  # noqa: N818 - a finding, not a fault
    """Why a model cannot run as one flat batch."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands for an attention mask while planning: which tokens a query sees."""

    window: int | None


def window_of(mask_function: Callable[..., torch.Tensor], max_len: int) -> int | None:
    """The sliding window of a mask given as a function of positions; None for a plain causal mask.

    Args:
        mask_function: ``(batch, head, q, kv) -> bool``, as ``transformers`` composes it.
        max_len: the longest sequence that will run.

    Raises:
        NotPacked: the mask is neither.
    """
    queries = sorted({*range(min(64, max_len)), *(max_len * i // 64 for i in range(1, 64)), max_len - 1})
    # Every row is looked at whole, so that chunks and windows of any size show.
    window: int | None = None
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(max_len)
    for q in reversed(queries):
        row = mask_function(zero, zero, torch.tensor(q), keys)
        row = torch.as_tensor(row).expand(max_len)
        visible = int(row.sum())
        if q == queries[-1] and visible != q + 1:
            window = visible
        low = 0 if window is None else max(0, q - window + 1)
        if visible != q - low + 1 or not bool(row[low : q + 1].all()):
            raise NotPacked("its attention mask is neither causal nor a causal sliding window")
    return window


class _ArangeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where a model counts the tokens of the batch itself instead of using the positions it was
    given."""

    def __init__(self, inside: list[nn.Module], suspects: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = inside
        self.suspects = suspects
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert _recorder is not None
        if (
            func.overloadpacket is torch.ops.aten.arange
            and isinstance(out, torch.Tensor)
            and not _recorder.ours
        ):
            innermost = self.inside[-1] if self.inside else None
            if out.numel() == _PLAN_TOKENS and (innermost is None or id(innermost) in self.suspects):
                self.seen.append(type(innermost).__name__)
        return out


@dataclass(slots=True)
class _Call:
    module: nn.Module
    layer: AttentionLayer


@dataclass(slots=True)
class _Recorder:
    step: StepState
    calls: list[_Call] = field(default_factory=list)
    max_len: int = 0
    ours: bool = False
    """Our own attention runs; what it counts is not the model's doing."""


_recorder: _Recorder | None = None


def _planning_mask(mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> Mask:
    assert _recorder is not None
    return Mask(window_of(mask_function, _recorder.max_len))


def _planning_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    assert _recorder is not None
    if not isinstance(attention_mask, Mask):
        raise NotPacked("an attention layer got a mask that the model did not build in the common way")
    unknown = sorted(
        k for k, v in kwargs.items() if k not in _UNDERSTOOD and v is not None and v is not False
    )
    if unknown:
        raise NotPacked(f"its attention passes {', '.join(unknown)}, which is not understood here")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise NotPacked("its attention is not causal")
    if query.dim() != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise NotPacked("its attention has an unusual shape")
    scaling = kwargs.get("scaling")
    layer = AttentionLayer(
        step=_recorder.step,
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=attention_mask.window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    if any(c.module is module for c in _recorder.calls):
        raise NotPacked("one attention layer is used more than once in a forward")
    _recorder.calls.append(_Call(module, layer))
    _recorder.ours = True
    try:
        return layer.attend(query, key, value).transpose(1, 2), None
    finally:
        _recorder.ours = False


def _configs(model: nn.Module) -> list[Any]:
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation")]


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Run a model with another attention implementation for a while."""
    configs = _configs(model)
    before = [c._attn_implementation for c in configs]
    try:
        for c in configs:
            c._attn_implementation = name
        yield
    finally:
        for c, old in zip(configs, before, strict=True):
            c._attn_implementation = old


def set_attention_implementation(model: nn.Module, name: str) -> None:
    for c in _configs(model):
        c._attn_implementation = name


def rope_limit(model: nn.Module) -> int | None:
    """The sequence length from which a model's rotary embedding depends on the whole sequence's length, if
    any."""
    limits: list[int] = []
    for m in model.modules():
        kinds = getattr(m, "rope_type", None)
        config = getattr(m, "config", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind not in ("dynamic", "longrope"):
                continue
            parameters = getattr(config, "rope_parameters", None) or {}
            if layer_type is not None:
                parameters = parameters.get(layer_type, {})
            limit = parameters.get("original_max_position_embeddings") if kind == "longrope" else None
            limits.append(int(limit or getattr(m, "original_max_seq_len", 0) or 0))
    return min(limits) if limits else None


@contextmanager
def _module_stack(model: nn.Module) -> Iterator[list[nn.Module]]:
    stack: list[nn.Module] = []
    hooks = []
    for m in model.modules():
        hooks.append(m.register_forward_pre_hook(lambda mod, args: stack.append(mod)))
        hooks.append(m.register_forward_hook(lambda mod, args, out: stack.pop() and None, always_call=True))
    try:
        yield stack
    finally:
        for h in hooks:
            h.remove()


def plan_attention(
    decoder: nn.Module, num_layers: int, step: StepState, max_len: int, device: torch.device
) -> list[AttentionLayer]:
    """Learn every attention layer's rules and hang them on its module as ``layertap_attention``.

    Args:
        decoder: the language model without its output head.
        num_layers: how many decoder layers it has; each must attend through the common interface, once.
        step: shared by all layers.
        max_len: the longest sequence that will run; masks are checked up to there.

    Raises:
        NotPacked: the model cannot run as a flat batch; the message completes "because ...".
    """
    global _recorder
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    ALL_ATTENTION_FUNCTIONS.register(PLANNING, _planning_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PLANNING, _planning_mask)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise NotPacked("it takes no position ids")
    limit = rope_limit(decoder)
    if limit is not None and max_len > limit:
        raise NotPacked(
            f"its rotary embedding changes with the sequence's length beyond {limit} tokens; "
            f"with max_model_len={limit} or less it can"
        )
    embeddings: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(1, _PLAN_TOKENS + 1, device=device)[None] % embeddings.weight.shape[0]
    positions = torch.arange(_PLAN_TOKENS, device=device)[None]
    _recorder = _Recorder(step, max_len=max_len)
    try:
        with (
            torch.inference_mode(),
            attention_implementation(decoder, PLANNING),
            _module_stack(decoder) as stack,
        ):
            watch = _ArangeWatch(stack, set())
            watch.suspects = {id(m) for m in decoder.modules() if _counts_positions(m, decoder)}
            with watch:
                decoder(input_ids=ids, use_cache=False, **position_arguments(decoder, positions))
        if watch.seen:
            raise NotPacked(f"{watch.seen[0]} counts positions itself")
        if len(_recorder.calls) != num_layers:
            raise NotPacked(
                f"{len(_recorder.calls)} of its {num_layers} layers attend through the common interface"
            )
        for call in _recorder.calls:
            call.module.layertap_attention = call.layer  # type: ignore[assignment]
        return [call.layer for call in _recorder.calls]
    except NotPacked:
        raise
    except Exception as e:
        raise NotPacked(f"its forward failed on a flat batch ({type(e).__name__}: {str(e)[:120]})") from e
    finally:
        _recorder = None


def _counts_positions(module: nn.Module, decoder: nn.Module) -> bool:
    """Modules in which counting the batch's tokens means counting positions: the decoder, attention, rotary
    parts."""
    name = type(module).__name__.lower()
    return module is decoder or any(
        word in name for word in ("attention", "rotary", "decoderlayer", "embedding")
    )


def position_arguments(decoder: nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions [1, T] under every name this model takes them by."""
    arguments = {"position_ids": positions}
    if "cache_position" in inspect.signature(decoder.forward).parameters:
        arguments["cache_position"] = positions[0]
    return arguments
