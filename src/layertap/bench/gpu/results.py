"""The result file of the ``gpu`` suite: what was measured, the ratios, and how runs are put together.

It is written after every run of every way, so that a command that is killed loses nothing. A row's ratios
come from one command; an older, fuller measurement of the row stays until the new one is as full, which waits
under ``partial``.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layertap.bench.gpu.rows import Required, Row
from layertap.errors import InvalidInputError

SUITE = "gpu"
ORDER = (
    "each way in a process of its own, one after another, so that each has the GPU's memory to itself; "
    "ways with equal settings share a process over the rows of one command; one warm-up before each row"
)


class Results:
    """A result file, or, without a path, only its content.

    Args:
        path: merged into if it is there.
        command: for the file.

    Raises:
        InvalidInputError: the file holds something else.
    """

    def __init__(self, path: Path | None, command: str) -> None:
        self.path = path
        self.command = command
        self.document: dict[str, Any] = {"suite": SUITE, "order": ORDER, "rows": {}, "partial": {}}
        if path is not None and path.exists():
            self.document = _read(path)
        self._new: dict[str, dict[str, Any]] = {}

    def begin(self, row: Row, facts: Mapping[str, Any], left_out: Mapping[str, str]) -> None:
        """Start a row anew.

        Args:
            facts: on what it is measured.
            left_out: ways that are not measured, with the reason.
        """
        self._new[row.letter] = {
            "workload": row.to_json(),
            "command": self.command,
            **facts,
            "ways": {},
            "left_out": dict(left_out),
            "ratios": [],
        }

    def record(self, row: Row, way: str, outcome: Mapping[str, Any]) -> None:
        """Keep what is known of a way by now, and write the file."""
        entry = self._new[row.letter]
        entry["ways"][way] = dict(outcome)
        entry["ratios"] = ratios(row, entry)
        older = self.document["rows"].get(row.letter)
        if older is None or _measured(older) <= _measured(entry):
            self.document["rows"][row.letter] = entry
            self.document["partial"].pop(row.letter, None)
        else:
            self.document["partial"][row.letter] = entry
        self.write()

    def outcome(self, row: Row, way: str) -> dict[str, Any] | None:
        """What this command has recorded of a way."""
        outcome: dict[str, Any] | None = self._new[row.letter]["ways"].get(way)
        return outcome

    def write(self) -> None:
        """Write the file under another name, then rename it."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self.document["rows"]
        self.document["rows"] = {letter: rows[letter] for letter in sorted(rows)}
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(part, self.path)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        found = document["suite"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found != SUITE:
        raise InvalidInputError("--output", str(path), "a new file, or one that this suite has written")
    assert isinstance(document, dict)
    return document


def _measured(entry: Mapping[str, Any]) -> set[str]:
    return {way for way, outcome in entry["ways"].items() if "error" not in outcome}


def rates(num_tokens: int, seconds: Iterable[float]) -> dict[str, float]:
    """Tokens/s of several runs: ``min``, ``median`` and ``max``."""
    found = [num_tokens / s for s in seconds]
    return {"min": min(found), "median": statistics.median(found), "max": max(found)}


def ratios(row: Row, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each required ratio, and the first way's against every other way that was measured.

    Returns:
        Objects with ``way``, ``against``, ``ratio`` (None: not measured, ``why`` says why), ``required`` and
        ``reached`` (None where nothing is required or known).
    """
    ways = entry["ways"]
    pairs: list[tuple[str, str, float | None]] = [
        (r.way, r.against, r.ratio) for r in row.required if _wanted(row, r, ways)
    ]
    known = {way for pair in pairs for way in pair[:2]}
    pairs += [(row.ways[0], way, None) for way in ways if way not in known and row.ways[0] in ways]
    result = []
    for way, against, required in pairs:
        ratio = ratio_of(ways.get(way), ways.get(against))
        reached = None
        if ratio is not None and required is not None:
            reached = ratio <= required if row.measure == "start" else ratio >= required
        found = {"way": way, "against": against, "ratio": ratio, "required": required, "reached": reached}
        if ratio is None:
            found["why"] = _why(entry, (way, against))
        result.append(found)
    return result


def _wanted(row: Row, required: Required, ways: Mapping[str, Any]) -> bool:
    """A ratio of an optional way is told only where that way was measured."""
    return all(way in ways for way in (required.way, required.against) if way in row.optional)


def _why(entry: Mapping[str, Any], ways: Sequence[str]) -> str:
    for way in ways:
        if way in entry["left_out"]:
            return str(entry["left_out"][way])
        if "error" in entry["ways"].get(way, {}):
            return f"{way} failed"
    return "not measured"


def ratio_of(mine: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> float | None:
    """The ratio of two ways' median rates; of starts, the larger one of those that both have."""
    if mine is None or other is None:
        return None
    if "tokens_per_second" in mine and "tokens_per_second" in other:
        return float(mine["tokens_per_second"]["median"] / other["tokens_per_second"]["median"])
    pairs = zip(mine.get("starts", []), other.get("starts", []), strict=False)
    found = [float(a["seconds"] / b["seconds"]) for a, b in pairs]
    return max(found) if found else None
