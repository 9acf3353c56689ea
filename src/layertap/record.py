"""One sequence's hidden states with what is known of them, and how they are read back from a file."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from layertap.errors import CorruptRecordError
from layertap.layers import NORM, NORM_CONVENTION, LayerId, format_layers
from layertap.layout import CHECKSUM_PREFIX, HIDDEN_STATES, SCALES, TOKEN_IDS, RecordHeader, read_header

FORMAT_VERSION = "1"
_READ_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class HiddenStates:
    """The kept hidden states of one sequence.

    T kept tokens, L kept layers, H hidden size.
    """

    token_ids: torch.Tensor
    """[T] int64"""
    hidden_states: torch.Tensor
    """[T, L, H] in the storage dtype"""
    scales: torch.Tensor | None = None
    """[T, 1, 1] float32 for float8 storage: value = hidden_states * scales"""
    request_id: str = ""
    layer_ids: tuple[LayerId, ...] = ()
    """What the L columns are (see :mod:`layertap.layers`); empty where the file does not say."""
    metadata: dict[str, str] = field(default_factory=dict)
    positions: tuple[int, ...] | None = None
    """[T] positions in the sequence; None when every token was kept."""

    @property
    def dequantized(self) -> torch.Tensor:
        """[T, L, H]: float32 with the scales applied where there are any, else ``hidden_states`` as they
        are."""
        if self.scales is None:
            return self.hidden_states
        return self.hidden_states.float() * self.scales

    def float(self) -> torch.Tensor:
        """[T, L, H] float32, scales applied."""
        return self.dequantized.float()

    def column(self, layer_id: LayerId) -> torch.Tensor:
        """[T, H]: the states of one layer, scales applied. The first one where it was asked for twice.

        Raises:
            KeyError: the record does not hold this layer, or does not say which it holds.
        """
        if layer_id not in self.layer_ids:
            held = format_layers(self.layer_ids) or "unknown layers (the file does not say which)"
            raise KeyError(f"layer {layer_id!r} is not in this record; it holds {held}")
        column = self.hidden_states[:, self.layer_ids.index(layer_id)]
        return column if self.scales is None else column.float() * self.scales[:, 0]

    def __len__(self) -> int:
        return self.token_ids.shape[0]


def format_positions(positions: Sequence[int]) -> str:
    """Positions as runs, in their order: ``"0:5,9,12:20"``, ends excluded."""
    array = np.asarray(positions, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    starts, ends = array[np.r_[0, cuts]], array[np.r_[cuts - 1, len(array) - 1]]
    return ",".join(
        f"{a}:{b + 1}" if b > a else f"{a}" for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def parse_positions(text: str) -> tuple[int, ...]:
    """The inverse of :func:`format_positions`.

    Raises:
        ValueError: the text is no list of runs.
    """
    positions: list[int] = []
    for run in text.split(","):
        start, colon, end = run.partition(":")
        positions.extend(range(int(start), int(end)) if colon else (int(start),))
    return tuple(positions)


def build_metadata(
    *,
    request_id: str,
    model: str,
    layer_ids: Sequence[LayerId],
    num_hidden_layers: int,
    storage_dtype: torch.dtype,
    num_prompt_tokens: int,
    num_tokens: int,
    positions: range | Sequence[int],
) -> dict[str, str]:
    """The strings of a record's header, without checksums.

    Args:
        num_tokens: tokens of the sequence that have states; ``positions`` is left out when it is all of them.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "request_id": request_id,
        "model": model,
        "layer_ids": _layers_text(tuple(layer_ids)),
        "num_hidden_layers": str(num_hidden_layers),
        "norm_convention": NORM_CONVENTION,
        "storage_dtype": str(storage_dtype).removeprefix("torch."),
        "num_prompt_tokens": str(num_prompt_tokens),
    }
    if positions != range(num_tokens):
        if len(positions) == 1:
            metadata["positions"] = str(positions[0])
        else:
            metadata["positions"] = format_positions(positions)
    return metadata


@functools.lru_cache(64)
def _layers_text(ids: tuple[LayerId, ...]) -> str:
    return format_layers(ids)


@functools.lru_cache(64)
def _layers_of_text(text: str) -> tuple[LayerId, ...]:
    return tuple(NORM if word == NORM else int(word) for word in text.split(","))


def states_of(
    metadata: dict[str, str],
    token_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
) -> HiddenStates:
    """Put tensors and header strings together.

    Raises:
        ValueError: ``layer_ids`` or ``positions`` cannot be parsed or do not fit the tensors.
    """
    listed = metadata.get("layer_ids")
    layer_ids: tuple[LayerId, ...] = ()
    if listed:
        layer_ids = _layers_of_text(listed)
        if len(layer_ids) != hidden_states.shape[1]:
            raise ValueError(f"layer_ids {listed} for {hidden_states.shape[1]} columns")
    positions = parse_positions(metadata["positions"]) if "positions" in metadata else None
    if positions is not None and len(positions) != token_ids.shape[0]:
        raise ValueError(f"{len(positions)} positions for {token_ids.shape[0]} tokens")
    request_id = metadata.get("request_id", "")
    return HiddenStates(token_ids, hidden_states, scales, request_id, layer_ids, metadata, positions)


def read_record(path: str | os.PathLike[str], verify: bool = True) -> HiddenStates:
    """Read a record; the tensors are memory-mapped.

    Args:
        path: a file of this package, or one of vLLM's ``ExampleHiddenStatesConnector``, which has no
            metadata. verify: check the checksums that the header carries; the structure is always checked.

    Raises:
        CorruptRecordError: the file is cut off, damaged, or no record of hidden states.
        FileNotFoundError: there is no such file.
    """
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {
                name: file.get_tensor(name)
                for name in (TOKEN_IDS, SCALES, HIDDEN_STATES)
                if name in header.tensors
            }
    except SafetensorError as error:
        raise CorruptRecordError(path, str(error)) from None
    if verify:
        for name, tensor in tensors.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            _compare(path, name, header, xxhash.xxh3_64_intdigest(data.data))
    try:
        return states_of(header.metadata, tensors[TOKEN_IDS], tensors[HIDDEN_STATES], tensors.get(SCALES))
    except ValueError as error:
        raise CorruptRecordError(path, f"the header contradicts itself: {error}") from None


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """What :func:`verify_record` found in an intact file."""

    path: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    metadata: dict[str, str]
    checksummed: bool
    """False: the file carries no checksums, so only its structure and size were checked."""


def verify_record(path: str | os.PathLike[str]) -> RecordCheck:
    """Check a file from end to end in a few megabytes of memory.

    Raises:
        CorruptRecordError: the file is cut off, damaged, or no record of hidden states.
        FileNotFoundError: there is no such file.
    """
    header = read_header(path)
    checksummed = True
    with open(path, "rb") as file:
        for entry in header.tensors.values():
            if header.checksum(entry.name) is None:
                checksummed = False
                continue
            digest = xxhash.xxh3_64()
            file.seek(entry.begin)
            left = entry.end - entry.begin
            while left and (piece := file.read(min(left, _READ_BYTES))):
                digest.update(piece)
                left -= len(piece)
            _compare(path, entry.name, header, digest.intdigest())
    hidden = header.tensors[HIDDEN_STATES]
    t, n, h = hidden.shape
    return RecordCheck(os.fspath(path), (t, n, h), hidden.dtype, header.metadata, checksummed)


def _compare(path: str | os.PathLike[str], name: str, header: RecordHeader, found: int) -> None:
    expected = header.checksum(name)
    if expected is not None and expected != f"{found:016x}":
        raise CorruptRecordError(
            path, f"damaged: {CHECKSUM_PREFIX}{name} is {found:016x}, the header says {expected}"
        )
