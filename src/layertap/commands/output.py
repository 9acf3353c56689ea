"""What the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from layertap.errors import InvalidInputError, LayertapError


class CommandFailedError(LayertapError):
    """A command did its work, but not all of it succeeded: exit status 1."""


def print_json(value: dict[str, Any]) -> None:
    """One JSON object as one line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_error(message: str) -> None:
    """One line on standard error."""
    print("layertap: " + " ".join(message.split()), file=sys.stderr, flush=True)


def check_output_format(value: str) -> None:
    if value not in ("text", "json"):
        raise InvalidInputError("--output-format", value, "text or json")
