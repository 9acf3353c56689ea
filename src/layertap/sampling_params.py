"""How output tokens are chosen. The fields carry vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from layertap.errors import InvalidInputError


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    With ``max_tokens=0`` nothing is generated: the prompt is prefilled, its hidden states are delivered, and
    neither the final norm nor the output head runs.
    """

    n: int = 1
    """Number of sequences to generate for the prompt."""
    max_tokens: int = 16
    """Most tokens to generate, from 0 up."""
    temperature: float = 1.0
    """0 is greedy; anything else below 0.01 counts as 0.01, as in vLLM."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach this sum, in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    seed: int | None = None
    """Seed of this request's own random generator; None draws from the engine's seed."""
    stop: str | Sequence[str] | None = None
    """Strings that end generation. They are not part of the returned text."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end generation, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    min_tokens: int = 0
    """No stop before this many tokens."""
    logprobs: int | None = None
    """Report the log-probabilities of this many most likely tokens (and of the chosen one) at each step."""
    prompt_logprobs: int | None = None
    """The same at each prompt position. The prompt is then computed whole, without prefix-cache hits."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the returned text."""
    detokenize: bool = True
    """Produce text. Off saves time where only states or ids are wanted."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """What to keep of this request's hidden states: ``layers``, ``tokens``, ``include_output_tokens``,
    ``dtype``."""
    extra_args: Mapping[str, Any] | None = None
    """vLLM's way to pass ``{"kv_transfer_params": {...}}``; merged into :attr:`kv_transfer_params`."""

    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        self._check_int("n", 1)
        self._check_int("max_tokens", 0)
        self._check_int("min_tokens", 0)
        self._check_number("temperature", 0.0, 1e6, "a number from 0 (greedy) to 1e6")
        self._check_number("top_p", 1e-9, 1.0, "a number above 0 and at most 1")
        if self.top_k == -1:
            self.top_k = 0
        self._check_int("top_k", 0)
        if self.seed is not None:
            self._check_int("seed", -(2**63))
            if self.seed >= 2**64:
                raise InvalidInputError("seed", self.seed, "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(name, getattr(self, name), "True or False")
        stop = self.stop
        if stop is None:
            strings: tuple[str, ...] = ()
        elif isinstance(stop, str):
            strings = (stop,)
        elif isinstance(stop, Sequence):
            strings = tuple(stop)
        else:
            raise InvalidInputError("stop", stop, "a string or a list of strings")
        if any(not isinstance(s, str) or not s for s in strings):
            raise InvalidInputError("stop", stop, "non-empty strings")
        self.stop_strings = strings
        ids = self.stop_token_ids
        if ids is not None and (
            isinstance(ids, str | bytes)
            or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids)
        ):
            raise InvalidInputError("stop_token_ids", ids, "a list of token ids")
        if self.extra_args:
            unknown = set(self.extra_args) - {"kv_transfer_params"}
            if unknown:
                raise InvalidInputError(
                    "extra_args", dict(self.extra_args), "only the key 'kv_transfer_params'"
                )
            given = self.extra_args.get("kv_transfer_params")
            if given is not None:
                if not isinstance(given, Mapping):
                    raise InvalidInputError("extra_args.kv_transfer_params", given, "an object")
                self.kv_transfer_params = {**given, **(self.kv_transfer_params or {})}

    def _check_int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InvalidInputError(name, value, f"an integer from {low} up")

    def _check_number(self, name: str, low: float, high: float, allowed: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidInputError(name, value, allowed)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is refused by name."""
        known = {f.name for f in fields(cls) if f.init}
        for key in values:
            if key not in known:
                raise InvalidInputError(key, values[key], f"one of {', '.join(sorted(known))}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
