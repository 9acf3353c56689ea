"""``layertap verify``: check every record of a folder from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layertap.commands.output import CommandFailedError, check_output_format, print_json
from layertap.errors import InvalidInputError

EPILOG = "Example:\n\nlayertap verify states"


def verify(
    path: Annotated[Path, typer.Argument(help="Folder of .safetensors files, or one file.", metavar="DIR")],
    output_format: Annotated[
        str,
        typer.Option(help="text, or json: a line for each broken file and one at the end.", metavar="FORMAT"),
    ] = "text",
) -> None:
    """Check structure, size and checksums of every file; exit with 1 if one is broken."""
    check_output_format(output_format)
    from layertap.corpus.records import verify_corpus

    intact = broken = unchecked = 0
    for status in verify_corpus(path):
        if status.check is not None:
            intact += 1
            unchecked += not status.check.checksummed
            continue
        broken += 1
        if output_format == "json":
            print_json({"path": status.path, "ok": False, "problem": status.problem})
        else:
            print(f"{status.path}: {status.problem}", flush=True)
    if intact + broken == 0:
        raise InvalidInputError("DIR", str(path), "a folder with at least one .safetensors file")
    if output_format == "json":
        print_json({"summary": {"intact": intact, "broken": broken, "without_checksums": unchecked}})
    else:
        note = (
            f" ({unchecked:,} of them without checksums: only structure and size checked)"
            if unchecked
            else ""
        )
        print(f"{intact:,} intact{note}, {broken:,} broken")
    if broken:
        raise CommandFailedError(f"{broken} of {intact + broken} files are broken; extract them again")
