"""Layer numbering: ids of boundaries of the residual stream, and their parsing.

A layer id names a boundary, as in vLLM's ``eagle_aux_hidden_state_layer_ids``: 0 is the embeddings (the input
of decoder layer 0), k is the state after k decoder layers, N (``num_hidden_layers``) is the state after the
last layer and before the final norm, and ``"norm"`` is the state after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from layertap.errors import InvalidInputError

NORM: Literal["norm"] = "norm"
LayerId = int | Literal["norm"]
LayerSpec = str | int | Sequence[int | str]

NORM_CONVENTION = (
    "ids are boundaries of the residual stream; id N is before the final norm, 'norm' is after it"
)


def eagle3_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """The boundaries that EAGLE-3 drafts are trained on: three aux states and the last one, ``[2, N//2, N-3,
    N]``."""
    n = num_hidden_layers
    return (2, n // 2, n - 3, n)


def parse_layers(spec: LayerSpec, num_hidden_layers: int, field_name: str = "layers") -> tuple[LayerId, ...]:
    """Turn what a user wrote into layer ids, in the order and with the duplicates that were asked for.

    Args:
        spec: ``"all"``, ``"eagle3"``, ``"norm"``, ``"3,18,-1"``, one int, or a sequence of ints and
            ``"norm"``. Negative ids count from N: -1 is N, the state after the last layer.
        num_hidden_layers: N, the number of decoder layers of the verifier.
        field_name: the name used in error messages.

    Raises:
        InvalidInputError: an id is outside 0..N, is not an integer, or the list is empty.
    """
    n = num_hidden_layers
    allowed = f"layer ids from 0 to {n} (or -{n + 1} to -1, counted from {n}), 'norm', 'all' or 'eagle3'"
    items: list[int | str] = []
    if isinstance(spec, str):
        items = [part.strip() for part in spec.split(",")]
    elif isinstance(spec, bool):
        raise InvalidInputError(field_name, spec, allowed)
    elif isinstance(spec, int):
        items = [spec]
    elif isinstance(spec, Sequence):
        items = list(spec)
    else:
        raise InvalidInputError(field_name, spec, allowed)

    ids: list[LayerId] = []
    for item in items:
        if isinstance(item, str):
            word = item.strip()
            if word == "all":
                ids.extend(range(n + 1))
                continue
            if word == "eagle3":
                if n < 4:
                    raise InvalidInputError(
                        field_name, item, f"'eagle3' needs at least 4 layers; this model has {n}"
                    )
                ids.extend(eagle3_layers(n))
                continue
            if word == NORM:
                ids.append(NORM)
                continue
            try:
                item = int(word)
            except ValueError:
                raise InvalidInputError(field_name, item, allowed) from None
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidInputError(field_name, item, allowed)
        if not -(n + 1) <= item <= n:
            raise InvalidInputError(field_name, item, allowed)
        ids.append(item if item >= 0 else item + n + 1)
    if not ids:
        raise InvalidInputError(field_name, spec, f"at least one of {allowed}")
    return tuple(ids)


def format_layers(ids: Sequence[LayerId]) -> str:
    """The inverse of :func:`parse_layers` for explicit ids: ``"3,18,norm"``."""
    return ",".join(str(i) for i in ids)


@dataclass(frozen=True, slots=True)
class ServedLayers:
    """The layers an engine taps: the order that was asked for, and the columns that the cache really holds.

    The cache holds each boundary once, in depth order (``norm`` last). Order and duplicates are made when
    states are copied out.
    """

    ids: tuple[LayerId, ...]
    """As asked for; the default selection of a request."""
    num_hidden_layers: int
    columns: tuple[LayerId, ...] = field(init=False)
    """Distinct ids in depth order: column c of the cache holds boundary ``columns[c]``."""
    own_columns: tuple[int, ...] = field(init=False, repr=False)
    """The cache's columns of ``ids``, in their order."""

    def __post_init__(self) -> None:
        distinct = sorted(set(self.ids), key=lambda i: self.num_hidden_layers + 1 if i == NORM else int(i))
        object.__setattr__(self, "columns", tuple(distinct))
        object.__setattr__(self, "own_columns", self.columns_of(self.ids))

    def columns_of(self, ids: Sequence[LayerId]) -> tuple[int, ...]:
        """Cache columns of the given ids, in their order. Every id must be served."""
        where = {layer_id: column for column, layer_id in enumerate(self.columns)}
        return tuple(where[layer_id] for layer_id in ids)

    @property
    def highest(self) -> int:
        """Number of decoder layers that must run to compute every served id."""
        return max(self.num_hidden_layers if i == NORM else int(i) for i in self.columns)
