"""Token ids as users give them: checked, and put into an array.

A GPU waits for this, as of the prompts of a call none is run before all are checked. So ids are walked
through as rarely as may be, and the array serves all that comes after.
"""

from __future__ import annotations

import contextlib
import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from layertap.errors import InvalidInputError

TokenArray = np.ndarray[Any, np.dtype[np.int64]]
_LEAST, _MOST = -(2**63), 2**63 - 1


def plain_ints(ids: Sequence[Any], field: str) -> list[int]:
    """A list of its own of Python's integers, from integers of any kind: numpy's, tensors of one element.

    Raises:
        InvalidInputError: naming the first that is no integer, or a bool.
    """
    own = list(ids)
    if list(map(type, own)).count(int) == len(own):
        return own
    return [_integer(token, f"{field}[{i}]") for i, token in enumerate(own)]


def as_array(ids: list[int]) -> TokenArray:
    """Integers as an array. One beyond 64 bits becomes the nearest that is not: no vocabulary has either."""
    try:
        # The fastest of the ways from a list into an array.
        return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)
    except struct.error:
        return np.array([max(_LEAST, min(t, _MOST)) for t in ids], dtype=np.int64)


def is_clipped(array: TokenArray) -> bool:
    """Whether there may be ids that the array does not hold."""
    return len(array) > 0 and bool(array.max() == _MOST or array.min() == _LEAST)


def _integer(token: Any, field: str) -> int:
    is_bool = isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))
    with contextlib.suppress(Exception):  # whatever an object's own __index__ raises
        if not is_bool:
            return operator.index(token)
    raise InvalidInputError(field, token, "an integer token id")
