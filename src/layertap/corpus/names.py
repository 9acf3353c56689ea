"""Names of records: the same prompt in the same run always gets the same one, so that runs can go on."""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

from layertap.corpus.prompts import PromptLine
from layertap.errors import InvalidInputError
from layertap.sinks.file import check_request_id

_GENERATED = re.compile(r"\d{8,}-[0-9a-f]{16}(-\d+)?")


class RecordNames:
    """Hands out names, without the suffix.

    A line's own ``id`` is taken where it is a safe file name that no earlier line had. Otherwise the name is
    the line's index and a hash of its prompt and of ``run``.

    Args:
        run: whatever else decides what is in a record: model, layers, selection, sampling.
    """

    def __init__(self, run: Any) -> None:
        self._run = json.dumps(run, sort_keys=True, default=str)
        self._seen: set[int] = set()  # of 64-bit hashes: a few dozen bytes for each id

    def __call__(self, line: PromptLine) -> str:
        if line.id is not None and self._is_free(line.id):
            return line.id
        content = json.dumps(line.prompt, sort_keys=True, default=str)
        return f"{line.index:08d}-{xxhash.xxh3_64_hexdigest((self._run + content).encode())}"

    def _is_free(self, name: str) -> bool:
        try:
            check_request_id(name)
        except InvalidInputError:
            return False
        key = xxhash.xxh3_64_intdigest(name.encode())
        if key in self._seen or _GENERATED.fullmatch(name):
            return False
        self._seen.add(key)
        return True
