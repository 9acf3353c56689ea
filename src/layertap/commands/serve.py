"""``layertap serve``: OpenAI's HTTP API with hidden states, under vLLM's flags."""

from __future__ import annotations

import logging
import sys

import typer

from layertap.errors import InvalidInputError, LayertapError

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Register with ``app.command("serve", context_settings=CONTEXT_SETTINGS)``: the flags are parsed here,
as vLLM does, with ``-`` or ``_``."""


def serve(context: typer.Context) -> None:
    """Serve a model over OpenAI's HTTP API and hand out its hidden states (flags as vLLM's; see --help)."""
    from layertap.server.run import main

    logging.basicConfig(format="layertap: %(message)s", level=logging.WARNING)
    raise typer.Exit(main(context.args))


def main() -> int:
    """The same without typer: ``python -m layertap.commands.serve``."""
    from layertap.server.run import main as run

    logging.basicConfig(format="layertap: %(message)s", level=logging.WARNING)
    try:
        return run(sys.argv[1:])
    except InvalidInputError as error:
        print(f"layertap serve: {error}", file=sys.stderr)
        return 2
    except LayertapError as error:
        print(f"layertap serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
