"""What a request wants to keep: its ``kv_transfer_params``, parsed and checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from layertap.errors import InvalidInputError
from layertap.layers import LayerId, ServedLayers, format_layers, parse_layers

StorageDtype = Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"]
STORAGE_DTYPES: tuple[StorageDtype, ...] = ("auto", "float32", "bfloat16", "float16", "float8_e4m3fn")
FIELDS = ("layers", "tokens", "include_output_tokens", "dtype")
# vLLM's own clients may send these; they carry no choice here and are accepted without effect.
PASSIVE_FIELDS = ("do_remote_decode", "do_remote_prefill")

TokenSpec = Literal["all", "last"] | slice | tuple[int, ...]
_TOKENS_ALLOWED = "'all', 'last', {'start': a, 'end': b}, a slice without a step, or a list of positions"


def parse_tokens(spec: object, field_name: str = "kv_transfer_params.tokens") -> TokenSpec:
    """Check a token selection. Positions that need the sequence's length are checked in
    :meth:`Selection.positions`.

    Raises:
        InvalidInputError: the selection is none of the allowed forms.
    """
    if spec is None or spec == "all":
        return "all"
    if spec == "last":
        return "last"
    if isinstance(spec, slice):
        if spec.step not in (None, 1):
            raise InvalidInputError(field_name, spec, _TOKENS_ALLOWED)
        spec = {"start": spec.start, "end": spec.stop}
    if isinstance(spec, Mapping):
        unknown = set(spec) - {"start", "end"}
        start, end = spec.get("start"), spec.get("end")
        whole = all(v is None or (isinstance(v, int) and not isinstance(v, bool)) for v in (start, end))
        if unknown or not spec or not whole:
            raise InvalidInputError(field_name, spec, "{'start': a, 'end': b} with integers or null")
        return slice(start, end)
    if isinstance(spec, Sequence) and not isinstance(spec, str | bytes):
        if not spec or any(isinstance(p, bool) or not isinstance(p, int) for p in spec):
            raise InvalidInputError(field_name, spec, "a non-empty list of integer positions")
        return tuple(spec)
    raise InvalidInputError(field_name, spec, _TOKENS_ALLOWED)


@dataclass(frozen=True, slots=True)
class Selection:
    """One request's choice of layers, tokens and storage dtype."""

    layer_ids: tuple[LayerId, ...]
    """Output columns, in order."""
    columns: tuple[int, ...]
    """The cache column behind each output column."""
    tokens: TokenSpec = "all"
    include_output_tokens: bool = False
    dtype: StorageDtype = "auto"

    @classmethod
    def parse(
        cls, params: Mapping[str, Any] | None, served: ServedLayers, prefix: str = "kv_transfer_params."
    ) -> Selection:
        """Parse a request's ``kv_transfer_params``.

        Args:
            prefix: what stands before the fields' names where the user wrote them.

        Raises:
            InvalidInputError: an unknown field, a layer that is not served, or a value of the wrong form.
        """
        if not params:
            return cls(served.ids, served.own_columns)
        if not isinstance(params, Mapping):
            raise InvalidInputError("kv_transfer_params", params, "an object")
        for name in params:
            if name not in FIELDS and name not in PASSIVE_FIELDS:
                raise InvalidInputError(
                    f"{prefix}{name}", params[name], f"only the fields {', '.join(FIELDS)}"
                )
        layers = params.get("layers")
        ids, columns = served.ids, served.own_columns
        if layers is not None:
            ids = parse_layers(layers, served.num_hidden_layers, f"{prefix}layers")
            missing = [i for i in ids if i not in served.columns]
            if missing:
                raise InvalidInputError(
                    f"{prefix}layers", layers, f"a subset of the served layers {format_layers(served.ids)}"
                )
            columns = served.columns_of(ids)
        include = params.get("include_output_tokens", False)
        if not isinstance(include, bool):
            raise InvalidInputError(f"{prefix}include_output_tokens", include, "true or false")
        dtype = params.get("dtype", "auto")
        if dtype is None:
            dtype = "auto"
        if dtype not in STORAGE_DTYPES:
            raise InvalidInputError(f"{prefix}dtype", dtype, ", ".join(STORAGE_DTYPES))
        return cls(ids, columns, parse_tokens(params.get("tokens"), f"{prefix}tokens"), include, dtype)

    def check_length(self, num_tokens: int) -> None:
        """Refuse a selection that keeps nothing of, or reaches outside, a sequence of at least ``num_tokens``
        tokens.

        Raises:
            InvalidInputError: naming the positions that exist.
        """
        self.positions(num_tokens)

    def positions(self, num_tokens: int) -> range | tuple[int, ...]:
        """Kept positions for a sequence whose first ``num_tokens`` tokens have states, in output order."""
        name = "kv_transfer_params.tokens"
        if self.tokens == "all":
            return range(num_tokens)
        if self.tokens == "last":
            return range(num_tokens - 1, num_tokens)
        if isinstance(self.tokens, slice):
            kept = range(*self.tokens.indices(num_tokens))
            if not kept:
                raise InvalidInputError(
                    name, self.tokens, f"a slice that keeps at least one of {num_tokens} tokens"
                )
            return kept
        assert isinstance(self.tokens, tuple)
        for p in self.tokens:
            if not -num_tokens <= p < num_tokens:
                raise InvalidInputError(name, p, f"positions from -{num_tokens} to {num_tokens - 1}")
        return tuple(p % num_tokens for p in self.tokens)
