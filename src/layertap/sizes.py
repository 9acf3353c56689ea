"""Counts of tokens and bytes as people write them: ``4096``, ``64k``, ``1.5G``, ``2GiB``."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from decimal import Decimal
from typing import Any

from layertap.errors import InvalidInputError

_UNITS = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kmgtKMGT]i?)?)[bB]?")
ENGINE_SIZES = {"max_model_len": 1, "max_num_batched_tokens": 1, "kv_cache_memory_bytes": 1}
"""Fields of ``EngineConfig`` that are sizes, with the smallest that makes sense."""
ALLOWED = "a whole number, or one with a unit: 4096, 64k (thousands), 64K or 64KiB (1024s), 1.5G"


def parse_size(text: str, field: str, least: int = 0) -> int:
    """A count as vLLM reads it, where k, m, g and t are powers of 1000, and K, M, G and T (as Ki, Mi, Gi and
    Ti) of 1024.

    A fraction of a unit is rounded down to a whole number.

    Args:
        field: the flag, for the error.
        least: the smallest count that makes sense.

    Raises:
        InvalidInputError: ``text`` is none of the allowed forms, or less than ``least``.
    """
    count = _count(text)
    if count is None:
        raise InvalidInputError(field, text, ALLOWED)
    if count < least:
        raise InvalidInputError(field, text, f"{least} or more")
    return count


def parse_flags(values: MutableMapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Read the values of flags in place.

    Args:
        values: by the flags' names, with ``_`` for ``-``; those that were not given are None or not there.
        sizes: the names of those that are sizes, with the smallest count that makes sense.

    Raises:
        InvalidInputError: as :func:`parse_size`, naming the flag.
    """
    for name, least in sizes.items():
        if values.get(name) is not None:
            values[name] = parse_size(values[name], "--" + name.replace("_", "-"), least)


def _count(text: str) -> int | None:
    try:
        return int(text)  # also what Python takes beside digits, such as 1_000_000
    except ValueError:
        match = _FORM.fullmatch(text)
    if match is None or (not match[2] and "." in match[1]):
        return None
    unit = match[2]
    if len(unit) == 1 and unit.isupper():
        unit += "i"
    return int(Decimal(match[1]) * _UNITS[unit.lower()])
