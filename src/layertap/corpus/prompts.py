"""Reading prompts line by line: JSONL, or plain text with one prompt a line. Nothing is read ahead."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from layertap.errors import InvalidInputError

PromptsFormat = Literal["auto", "jsonl", "text"]
FORMATS: tuple[PromptsFormat, ...] = ("auto", "jsonl", "text")
KEYS = ("prompt", "prompt_token_ids", "messages")
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_LOOKED_AT = 3
"""Lines that decide whether a text file holds JSONL: a single one may be a text about JSON."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a dataset, or the reason why its line holds none."""

    index: int
    """Counts lines that are not blank, from 0."""
    where: str
    """``"prompts.jsonl:17"``, for messages."""
    prompt: Any = None
    """What :meth:`layertap.LLM.generate` takes; None if ``problem`` is set."""
    id: str | None = None
    """The line's own ``id``, if it has one."""
    problem: str | None = None
    """What is wrong with the line."""


def check_source(source: str | os.PathLike[str], prompts_format: PromptsFormat = "auto") -> None:
    """Refuse a file that cannot be read, or probably not as it is meant, before anything is loaded.

    Args:
        prompts_format: as :func:`read_prompts` takes it. With ``"auto"``, a file that would be read as text
            is looked into. Standard input and pipes are not: what is read there is gone, and they go by their
            first character anyway.

    Raises:
        InvalidInputError: it is missing, a folder, or not readable; or it would be read as text, and its
            first lines are prompts of JSONL.
    """
    if os.fspath(source) == "-" or _is_pipe(source):
        return
    try:
        with open(source, "rb") as file:
            looked_into = prompts_format == "auto" and not _is_jsonl(source) and os.path.isfile(source)
            key = _key_of_all(islice(_not_blank(file), _LOOKED_AT)) if looked_into else None
    except OSError as e:
        raise InvalidInputError(
            "prompts", os.fspath(source), f"a readable .jsonl or .txt file, or - for stdin ({e.strerror})"
        ) from None
    if key is not None:
        raise InvalidInputError(
            "prompts",
            os.fspath(source),
            f"a file of text, while this one's lines are JSON objects with {key!r}: choose --prompts-format "
            f"(prompts_format) jsonl to run what they hold, text to run the lines as they stand, or name the "
            f"file .jsonl",
        )


def _not_blank(file: IO[bytes]) -> Iterator[bytes]:
    return (line for line in _lines(file) if line.strip())


def _key_of_all(lines: Iterable[bytes]) -> str | None:
    """The key of the first prompt, if every line is an object that holds one; None if not, or without any
    line."""
    found: str | None = None
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # bytes that are no UTF-8 among them
            return None
        keys = [key for key in KEYS if value.get(key) is not None] if isinstance(value, dict) else []
        if not keys:
            return None
        found = found or keys[0]
    return found


def _is_jsonl(source: str | os.PathLike[str]) -> bool:
    return os.fspath(source).lower().endswith(_JSONL_SUFFIXES)


def _is_pipe(source: str | os.PathLike[str]) -> bool:
    """Whether it can be opened only once: a named pipe, or what a shell makes of ``<(command)``."""
    return Path(source).is_fifo()


def read_prompts(
    source: str | os.PathLike[str], prompts_format: PromptsFormat = "auto"
) -> Iterator[PromptLine]:
    """Yield the prompts of a file, skipping blank lines.

    A line of JSONL is an object with ``prompt``, ``prompt_token_ids`` or ``messages`` and perhaps an ``id``
    (other keys are ignored), a bare string, or a bare list of token ids. A line that is none of these yields
    a :class:`PromptLine` with a ``problem``; the lines after it are read all the same.

    Args:
        source: a path, or ``"-"`` for standard input.
        prompts_format: ``"auto"`` goes by the suffix (``.jsonl``, ``.ndjson``, ``.json``: JSONL, else text),
            and for standard input and pipes by the first character (``{``, ``[`` or ``"``: JSONL).

    Raises:
        InvalidInputError: the file cannot be read; or, with ``"auto"``, its suffix says text and its first
            lines are JSONL.
    """
    if prompts_format not in FORMATS:
        raise InvalidInputError("prompts_format", prompts_format, ", ".join(FORMATS))
    check_source(source, prompts_format)
    return _read(os.fspath(source), prompts_format)


def _read(source: str, prompts_format: PromptsFormat) -> Iterator[PromptLine]:
    if source == "-":
        name, opened = "stdin", nullcontext(sys.stdin.buffer)
        jsonl: bool | None = None
    else:
        name = Path(source).name
        jsonl = _is_jsonl(source) or (None if _is_pipe(source) else False)
        opened = open(source, "rb")  # type: ignore[assignment]  # noqa: SIM115 - closed below
    if prompts_format != "auto":
        jsonl = prompts_format == "jsonl"
    index = 0
    with opened as file:
        for number, raw in enumerate(_lines(file), 1):
            line = raw.strip()
            if not line:
                continue
            if jsonl is None:
                jsonl = line[:1] in (b"{", b"[", b'"')
            yield _parse(index, f"{name}:{number}", raw.rstrip(b"\r\n"), jsonl)
            index += 1


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    first = True
    for line in file:
        yield line.removeprefix(b"\xef\xbb\xbf") if first else line
        first = False


def _parse(index: int, where: str, raw: bytes, jsonl: bool) -> PromptLine:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        return PromptLine(index, where, problem=f"not UTF-8 text (byte {e.start})")
    if not jsonl:
        return PromptLine(index, where, text)
    try:
        value = json.loads(text)
    except ValueError as e:
        return PromptLine(index, where, problem=f"not JSON: {e}; write one object a line")
    except RecursionError:
        return PromptLine(index, where, problem="not JSON that can be read: nested too deeply")
    return prompt_line(index, where, value)


def prompt_line(index: int, where: str, value: Any) -> PromptLine:
    """Check the form of one prompt; its content is checked against the model later."""
    if isinstance(value, str):
        return PromptLine(index, where, value)
    if isinstance(value, list | tuple):
        return PromptLine(index, where, list(value))
    if not isinstance(value, Mapping):
        shown = json.dumps(value, default=repr)
        return PromptLine(
            index, where, problem=f"got {shown[:60]}; allowed: an object with one of {', '.join(KEYS)}"
        )
    given = {key: value[key] for key in KEYS if value.get(key) is not None}
    own = value.get("id")
    name = str(own) if isinstance(own, str | int) and not isinstance(own, bool) else None
    if not given:
        keys = ", ".join(map(str, value)) or "no keys"
        return PromptLine(
            index, where, id=name, problem=f"got an object with {keys}; allowed: one of {', '.join(KEYS)}"
        )
    if "prompt_token_ids" in given:
        given.pop("messages", None)
    elif "messages" in given:
        given.pop("prompt", None)
    return PromptLine(index, where, given, name)


def lines_of(prompts: Iterable[Any]) -> Iterator[PromptLine]:
    """The same for prompts that a program holds; objects may bring an ``id``."""
    for index, value in enumerate(prompts):
        yield value if isinstance(value, PromptLine) else prompt_line(index, f"prompts[{index}]", value)


def count_lines(source: str | os.PathLike[str]) -> int | None:
    """How many lines of a file are not blank; None for standard input and other streams."""
    if os.fspath(source) == "-" or not os.path.isfile(source):
        return None
    with open(source, "rb") as file:
        return sum(1 for line in file if line.strip())
