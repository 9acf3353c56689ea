"""What an output folder already holds, and whether it belongs to the run that is about to start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from layertap.corpus.records import is_record
from layertap.errors import CorruptRecordError, InvalidInputError
from layertap.layers import LayerId, format_layers
from layertap.layout import HIDDEN_STATES, TOKEN_IDS, read_header
from layertap.record import RecordCheck, parse_positions, verify_record
from layertap.selection import Selection


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What every record of one run has in common, as it stands in their metadata."""

    model: str
    layer_ids: tuple[LayerId, ...]
    num_hidden_layers: int
    storage_dtype: torch.dtype
    selection: Selection
    most_output_tokens: int
    """Output tokens whose states a record may hold."""

    def other_tokens(self, metadata: dict[str, str], num_rows: int) -> str | None:
        """How the tokens that a record holds differ from those that this run keeps of such a prompt; None if
        they may be the same."""
        try:
            num_prompt_tokens = int(metadata.get("num_prompt_tokens", ""))
            positions = _positions(metadata, num_rows)
        except ValueError:
            return None  # it does not say
        if _selected(positions, self, num_prompt_tokens):
            return None
        return f"{num_rows} rows of a prompt of {num_prompt_tokens} tokens, not those of this run's --tokens"

    def difference(self, metadata: dict[str, str]) -> str | None:
        """How a record of another run differs: ``"model 'a', not 'b'"``; None if it may be of this run."""
        found = metadata.get("model", "")
        if found != self.model and not _same_place(found, self.model):
            return f"model {found!r}, not {self.model!r}" if found else "no model in its metadata"
        expected = {
            "layer_ids": format_layers(self.layer_ids),
            "num_hidden_layers": str(self.num_hidden_layers),
            "storage_dtype": str(self.storage_dtype).removeprefix("torch."),
        }
        for name, value in expected.items():
            if metadata.get(name) != value:
                return f"{name} {metadata.get(name, 'unknown')}, not {value}"
        return None


def _same_place(a: str, b: str) -> bool:
    return bool(a) and os.path.exists(a) and os.path.exists(b) and os.path.realpath(a) == os.path.realpath(b)


def claim_folder(folder: Path, run: RunIdentity, overwrite: bool) -> int:
    """Make sure that a folder holds no records of another run.

    Returns:
        How many such records were removed (with ``overwrite``).

    Raises:
        InvalidInputError: it holds some, and ``overwrite`` is not set.
    """
    removed = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_record(entry.name):
                continue
            try:
                header = read_header(entry.path)
                difference = run.difference(header.metadata)
                states = header.tensors.get(HIDDEN_STATES)
                if difference is None and states is not None:
                    difference = run.other_tokens(header.metadata, states.shape[0])
            except (CorruptRecordError, FileNotFoundError):
                continue  # it is made again if this run needs it, and `layertap verify` tells of it otherwise
            if difference is None:
                continue
            if not overwrite:
                raise InvalidInputError(
                    "output",
                    str(folder),
                    f"a folder without records of another run: {entry.name} has {difference}; choose another "
                    "folder, or replace those records with --overwrite",
                )
            os.unlink(entry.path)
            removed += 1
    return removed


def check_existing(
    path: str, run: RunIdentity, prompt_token_ids: Sequence[int]
) -> tuple[RecordCheck | None, str]:
    """Whether a file is a complete and intact record of this prompt in this run.

    Returns:
        The check, or None with the reason why the record has to be made (again); ``""`` if there is no file.
    """
    try:
        check = verify_record(path)
    except FileNotFoundError:
        return None, ""
    except CorruptRecordError as e:
        return None, e.problem
    difference = run.difference(check.metadata)
    if difference is not None:
        return None, difference
    if not check.checksummed:
        return None, "no checksums in its metadata"
    if not _holds(check, path, run, prompt_token_ids):
        return None, "another prompt or token selection"
    return check, ""


def _holds(check: RecordCheck, path: str, run: RunIdentity, prompt: Sequence[int]) -> bool:
    """Whether the record's tokens are the ones that this prompt and the run's selection give."""
    rows = check.shape[0]
    if check.metadata.get("num_prompt_tokens") != str(len(prompt)):
        return False
    try:
        positions = _positions(check.metadata, rows)
    except ValueError:
        return False
    if len(positions) != rows or not _selected(positions, run, len(prompt)):
        return False
    expected = np.array([prompt[p] if p < len(prompt) else -1 for p in positions], dtype=np.int64)
    found = _token_ids(path)
    return len(found) == rows and bool(np.all((found == expected) | (expected == -1)))


def _positions(metadata: dict[str, str], num_rows: int) -> Sequence[int]:
    """Of a record's rows in their sequence.

    Raises:
        ValueError: the metadata are malformed.
    """
    listed = metadata.get("positions")
    return range(num_rows) if listed is None else parse_positions(listed)


def _selected(positions: Sequence[int], run: RunIdentity, num_prompt_tokens: int) -> bool:
    """Whether these are the positions that the run keeps of such a prompt, whatever it generated."""
    found = tuple(positions)
    for n in range(num_prompt_tokens, num_prompt_tokens + run.most_output_tokens + 1):
        try:
            kept = run.selection.positions(n)
        except InvalidInputError:
            continue  # nothing to keep of so short a sequence
        if len(kept) == len(found) and tuple(kept) == found:
            return True
    return False


def _token_ids(path: str) -> np.ndarray:
    entry = read_header(path).tensors[TOKEN_IDS]
    with open(path, "rb") as file:
        file.seek(entry.begin)
        return np.frombuffer(file.read(entry.end - entry.begin), dtype=np.int64)
