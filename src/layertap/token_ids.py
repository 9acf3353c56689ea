"""Token ids as users give them: checked, and put into an array, with one look at each.

A GPU waits for this: of the prompts of a call none is run before all are checked.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from layertap.errors import InvalidInputError

TokenArray = np.ndarray[Any, np.dtype[np.int64]]
_LIMITS = np.iinfo(np.int64)


def pack(ids: Sequence[int], field: str) -> TokenArray:
    """Integers as an array that cannot be written to. One beyond 64 bits becomes the nearest that is not: no
    vocabulary has either.

    Raises:
        InvalidInputError: naming the first that is no integer, or a bool.
    """
    try:
        # The fastest of the ways from a list into an array, and no number with a fraction passes.
        array = np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)
    except struct.error:
        array = np.array([_clipped(t, f"{field}[{i}]") for i, t in enumerate(ids)], dtype=np.int64)
    for i in np.flatnonzero(array.view(np.uint64) < 2).tolist():  # what a bool may be
        if isinstance(ids[i], bool):
            raise _no_integer(ids[i], f"{field}[{i}]")
    return array


def check_vocabulary(ids: Sequence[int], array: TokenArray, vocab_size: int, field: str) -> None:
    """Refuse ids that are no tokens of the model.

    Args:
        ids: at least one; what the first wrong one is called by.
        array: the same, packed.

    Raises:
        InvalidInputError: naming the first one.
    """
    if array.view(np.uint64).max() >= vocab_size:  # a negative one is large here
        i = int(np.argmax(array.view(np.uint64) >= vocab_size))
        raise InvalidInputError(f"{field}[{i}]", ids[i], f"token ids from 0 to {vocab_size - 1}")


def _clipped(token: object, field: str) -> int:
    if isinstance(token, bool):
        raise _no_integer(token, field)
    try:
        value = operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise _no_integer(token, field) from None
    return max(int(_LIMITS.min), min(value, int(_LIMITS.max)))


def _no_integer(token: object, field: str) -> InvalidInputError:
    return InvalidInputError(field, token, "an integer token id")
