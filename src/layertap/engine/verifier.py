"""The verifier: the language model whose hidden states are wanted, and the way in which it can be run."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layertap.config import EngineConfig
from layertap.engine import loader
from layertap.engine.attention import IMPLEMENTATION, AttentionLayer, BatchLayout, StepState
from layertap.engine.compile import wants_compiled
from layertap.engine.cpu_linear import release_linear_layers, suit_linear_layers
from layertap.engine.folded_norms import fold_norms
from layertap.engine.merged_mlp import merge_gate_and_up
from layertap.engine.plan import NotPacked, plan_attention, position_arguments, set_attention_implementation
from layertap.engine.start_phases import StartPhases
from layertap.errors import InvalidInputError

logger = logging.getLogger("layertap")

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass(eq=False)
class Verifier:
    """A loaded ``transformers`` model with what the engine knows of it."""

    model: Any
    """The causal language model, with its output head unless the engine extracts only."""
    decoder: nn.Module
    """The language model without its output head: embeddings, decoder layers, final norm."""
    layers: nn.ModuleList
    """Decoder layers; the first ones only, with ``extract_only``."""
    hf_config: Any
    num_hidden_layers: int
    """N, of the whole model."""
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    step: StepState = field(default_factory=StepState)
    attention: list[AttentionLayer] = field(default_factory=list)
    """Empty when the model runs sequence by sequence."""
    why_not_packed: str | None = None
    incremental: bool = True
    """Sequence by sequence: the model's own cache gives the same states as a whole forward."""

    @property
    def packed(self) -> bool:
        """True: one forward over a flat batch. False: sequence by sequence."""
        return self.why_not_packed is None

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token(self.dtype.itemsize) for layer in self.attention)

    def allocate(self, num_slots: int) -> None:
        """Allocate the KV cache of all layers."""
        for layer in self.attention:
            layer.allocate(num_slots, self.dtype, self.device)

    def close(self) -> None:
        """Drop the weights and the KV cache."""
        release_linear_layers(self.layers)
        for part in self.layers.modules():
            part.__dict__.pop("forward", None)  # merged or compiled: it refers to its module, a cycle
        self.model = None
        self.decoder = nn.Module()
        self.layers = nn.ModuleList()
        self.attention = []

    def packed_arguments(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> dict[str, Any]:
        """What the decoder's forward takes for a flat batch."""
        arguments: dict[str, Any] = {"input_ids": ids_T[None], "use_cache": False}
        arguments.update(position_arguments(self.decoder, positions_T[None]))
        return arguments

    def forward_packed(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        layout: BatchLayout,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """One forward over a flat batch; the taps fire on the way.

        Args:
            logit_rows: [n] flat indices whose logits are wanted; None runs no output head.

        Returns:
            [n, vocab] logits, or None.
        """
        self.step.layout = layout
        arguments = self.packed_arguments(ids_T, positions_T)
        try:
            if logit_rows is None:
                self.decoder(**arguments)
                return None
            logits = self.model(**arguments, logits_to_keep=logit_rows).logits[0]
        finally:
            self.step.layout = None
        assert isinstance(logits, torch.Tensor)
        return logits

    def forward_alone(
        self,
        ids_T: torch.Tensor,
        state: Any,
        start: int,
        want_logits: bool,
        keep_state: bool,
        all_logits: bool = False,
    ) -> tuple[torch.Tensor | None, Any]:
        """One forward over one sequence with the model's own cache class.

        Args:
            ids_T: tokens from ``start`` on.
            state: what the previous call returned; None for a fresh sequence.
            keep_state: a later call will go on from here.
            all_logits: the logits of all tokens, not of the last one.

        Returns:
            [1, vocab] logits of the last token or [T, vocab] of all (None if not wanted), and the state to go
            on with.
        """
        arguments: dict[str, Any] = {"input_ids": ids_T[None], "use_cache": keep_state}
        if state is not None:
            arguments.update(state)
            if "position_ids" in inspect.signature(self.decoder.forward).parameters:
                positions = torch.arange(start, start + len(ids_T), device=self.device)
                arguments.update(position_arguments(self.decoder, positions[None]))
        if want_logits:
            if self._keeps_logits and not all_logits:
                arguments["logits_to_keep"] = 1
            out = self.model(**arguments)
            logits = out.logits[0] if all_logits else out.logits[0, -1:]
        else:
            out = self.decoder(**arguments)
            logits = None
        if not keep_state:
            return logits, None
        for name in _CACHE_NAMES:  # newer releases of the library also answer to the older names
            if name in out and out[name] is not None:
                return logits, {name: out[name]}
        return logits, None

    @property
    def _keeps_logits(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters


def max_model_len_of(config: EngineConfig, hf_config: Any) -> int:
    """The longest sequence: what was asked for, or what the model is made for.

    Raises:
        InvalidInputError: more was asked for than the model's positions allow.
    """
    text = loader.text_config(hf_config)
    own = None
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            own = value
            break
    if config.max_model_len is None:
        return own or 8192
    if own is not None and config.max_model_len > own:
        raise InvalidInputError(
            "max_model_len", config.max_model_len, f"at most {own}, the model's own limit"
        )
    return config.max_model_len


def pick_device(config: EngineConfig) -> torch.device:
    """The device that ``config.device`` means.

    Raises:
        InvalidInputError: there is no such device.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInputError("device", config.device, "auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidInputError("device", config.device, "auto or cpu: this PyTorch sees no CUDA device")
        if ":" not in name:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise InvalidInputError(
                "device", config.device, f"cuda:0 to cuda:{torch.cuda.device_count() - 1}"
            )
    elif device.type != "cpu":
        raise InvalidInputError("device", config.device, "auto, cpu, cuda or cuda:N")
    return device


def load_verifier(
    config: EngineConfig,
    source: loader.ModelSource,
    hf_config: Any,
    keep_layers: int,
    device: torch.device,
    phases: StartPhases,
) -> Verifier:
    """Load the model and find out how it can be run.

    Raises:
        InvalidInputError: the model cannot be read.
        UnsupportedModelError: it cannot be run with a result that is known to be right.
    """
    from layertap.engine.self_check import check_alone, check_packed

    model = loader.load_model(config, source, hf_config, device, keep_layers)
    total = loader.num_hidden_layers(hf_config)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    short = config.extract_only and keep_layers < total
    _, layers = loader.decoder_layers(decoder, keep_layers if short else total)
    phases.end("weights")
    embeddings = model.get_input_embeddings()
    if device.type == "cuda":
        merge_gate_and_up(layers)
        if wants_compiled(config, device):  # kernel by kernel it would only cost
            fold_norms(decoder, layers, int(embeddings.weight.shape[0]))
    verifier = Verifier(
        model=model,
        decoder=decoder,
        layers=layers,
        hf_config=hf_config,
        num_hidden_layers=total,
        hidden_size=int(loader.text_config(hf_config).hidden_size),
        vocab_size=int(embeddings.weight.shape[0]),
        dtype=embeddings.weight.dtype,
        device=device,
        max_model_len=max_model_len_of(config, hf_config),
    )
    try:
        if not verifier._keeps_logits and not config.extract_only:
            raise NotPacked("it computes logits for all tokens at once")
        verifier.attention = plan_attention(
            decoder, len(layers), verifier.step, verifier.max_model_len, device
        )
        if config.self_check:
            check_packed(verifier, with_logits=not config.extract_only)
        set_attention_implementation(model, IMPLEMENTATION)
    except NotPacked as e:
        verifier.attention = []
        verifier.why_not_packed = str(e)
        verifier.incremental = check_alone(verifier, with_logits=not config.extract_only)
        logger.warning(
            "%s runs sequence by sequence, because %s: right, but slower%s",
            type(model).__name__,
            e,
            "" if verifier.incremental else " (each generated token computes its sequence again)",
        )
    phases.end("plan and check")
    if device.type == "cpu":
        suit_linear_layers(layers, verifier.dtype)
        phases.end("linear layers")
    return verifier
