"""The safetensors layout of a record, known to the byte before its first row is written.

A file is an 8-byte little-endian header length, a JSON header padded with spaces to a multiple of 8, and the
tensors, back to back: ``token_ids``, ``hidden_states_scales`` (float8 only), ``hidden_states``. The checksums
in the header have a fixed width, so the header can be written last, over the space kept for it. The format is
safetensors': https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from layertap.errors import CorruptRecordError

TOKEN_IDS = "token_ids"
SCALES = "hidden_states_scales"
HIDDEN_STATES = "hidden_states"
CHECKSUM_PREFIX = "xxh3_"
_NO_CHECKSUM = "0" * 16
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: offsets count from the file's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class RecordLayout:
    """Header and offsets of a record that is about to be written.

    Args:
        shape: (T, L, H) of ``hidden_states``.
        dtype: its storage dtype.
        has_scales: whether ``hidden_states_scales`` [T, 1, 1] float32 goes with it.
        metadata: strings for the header, without checksums.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, has_scales: bool, metadata: Mapping[str, str]
    ) -> None:
        tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = [(TOKEN_IDS, torch.int64, shape[:1])]
        if has_scales:
            tensors.append((SCALES, torch.float32, (shape[0], 1, 1)))
        tensors.append((HIDDEN_STATES, dtype, shape))
        entries: dict[str, object] = {}
        begin: dict[str, int] = {}
        offset = 0
        for name, tensor_dtype, dims in tensors:
            end = offset + math.prod(dims) * tensor_dtype.itemsize
            entries[name] = {"dtype": _NAMES[tensor_dtype], "shape": dims, "data_offsets": (offset, end)}
            begin[name] = offset
            offset = end
        sums = {CHECKSUM_PREFIX + name: _NO_CHECKSUM for name in begin}
        text = json.dumps({"__metadata__": sums | dict(metadata), **entries}, separators=(",", ":"))
        text += " " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text.encode("ascii")
        self.header_bytes = len(self._header)
        self.begin = {name: self.header_bytes + start for name, start in begin.items()}
        """Where each tensor starts in the file."""
        self.total_bytes = self.header_bytes + offset

    def header(self, checksums: Mapping[str, int]) -> bytes:
        """The file's first bytes, with the xxh3 checksum (64 bits) of each tensor."""
        header = bytearray(self._header)
        for name, value in checksums.items():
            start = self.checksum_at(name)
            header[start : start + len(_NO_CHECKSUM)] = f"{value:016x}".encode()
        return bytes(header)

    def checksum_at(self, name: str) -> int:
        """Where in the file the checksum of a tensor is: 16 hexadecimal digits."""
        key = f'"{CHECKSUM_PREFIX}{name}":"'.encode()
        return self._header.index(key) + len(key)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a file, checked against the file's size and against what a record must hold."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]

    def checksum(self, name: str) -> str | None:
        """The xxh3 checksum of a tensor, 16 hex digits; None where the file has none."""
        return self.metadata.get(CHECKSUM_PREFIX + name)


def read_header(path: str | os.PathLike[str]) -> RecordHeader:
    """Read and check the header of a record.

    Raises:
        CorruptRecordError: the file is cut off, has bytes too many, or is no record of hidden states.
        FileNotFoundError: there is no such file.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CorruptRecordError(path, f"cut off: {size} bytes, not even a header length")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CorruptRecordError(path, f"not a safetensors file: it claims a header of {length} bytes")
        if 8 + length > size:
            raise CorruptRecordError(path, f"cut off in the header: {size - 8} of {length} bytes are there")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CorruptRecordError(path, f"not a safetensors file: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise CorruptRecordError(path, "not a safetensors file: its header is no JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptRecordError(path, "the header's __metadata__ is no object of strings")
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_spans(path, list(tensors.values()), 8 + length, size)
    _check_record(path, tensors)
    return RecordHeader(metadata, tensors)


def _entry(path: str | os.PathLike[str], name: str, entry: object, data_start: int) -> TensorEntry:
    try:
        assert isinstance(entry, dict)
        shape = tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
        dtype = _DTYPES[entry["dtype"]]
        assert all(n >= 0 for n in shape)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise CorruptRecordError(path, f"the header's entry for {name!r} cannot be read: {entry!r}") from None
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CorruptRecordError(path, f"{name} {shape} {dtype} does not fit its {end - begin} bytes")
    return TensorEntry(name, dtype, shape, data_start + begin, data_start + end)


def _check_spans(path: str | os.PathLike[str], entries: Sequence[TensorEntry], start: int, size: int) -> None:
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != start:
            raise CorruptRecordError(path, f"{entry.name} starts at byte {entry.begin} instead of {start}")
        start = entry.end
    if size < start:
        raise CorruptRecordError(path, f"cut off: {size} of {start} bytes are there")
    if size > start:
        raise CorruptRecordError(path, f"{size - start} bytes too many at the end")


def _check_record(path: str | os.PathLike[str], tensors: Mapping[str, TensorEntry]) -> None:
    for name in (TOKEN_IDS, HIDDEN_STATES):
        if name not in tensors:
            raise CorruptRecordError(path, f"not a record of hidden states: it holds no {name}")
    tokens, hidden = tensors[TOKEN_IDS], tensors[HIDDEN_STATES]
    if tokens.dtype != torch.int64 or len(tokens.shape) != 1:
        raise CorruptRecordError(path, f"token_ids is {tokens.dtype} {tokens.shape}, not int64 [T]")
    if len(hidden.shape) != 3 or hidden.dtype == torch.int64:
        raise CorruptRecordError(
            path, f"hidden_states is {hidden.dtype} {hidden.shape}, not floating [T, L, H]"
        )
    if hidden.shape[0] != tokens.shape[0]:
        raise CorruptRecordError(
            path, f"{hidden.shape[0]} rows of hidden states for {tokens.shape[0]} tokens"
        )
    scales = tensors.get(SCALES)
    if scales is not None and (scales.dtype, scales.shape) != (torch.float32, (hidden.shape[0], 1, 1)):
        raise CorruptRecordError(path, f"{SCALES} is {scales.dtype} {scales.shape}, not float32 [T, 1, 1]")
