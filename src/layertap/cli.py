"""``layertap``: the command line. Commands live in :mod:`layertap.commands`, a file each.

Exit status: 0 done, 2 wrong usage, 1 anything else, 130 interrupted. An error is one line on standard error.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from layertap import __version__
from layertap.commands import extract, inspect, verify
from layertap.commands.interrupt import INTERRUPTED
from layertap.commands.output import print_error
from layertap.commands.quiet import DEBUG_VARIABLE, configure_logging, debugging
from layertap.errors import InvalidInputError

# typer brings its own copy of click, older versions import it: click's classes are found through typer's.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]
# Their flags are parsed elsewhere, or take values that may look like flags.
_OWN_FLAGS = ("serve",)
_EPILOG = (
    "Start here: layertap extract smollm2 --prompt 'The future of AI is' --layers eagle3 --output states"
)
_GO_ON = "interrupted; run the same command again to go on"
_OPTIONAL = ("serve", "bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"layertap {__version__}")
        raise typer.Exit


def build_app(rich_help: bool = True) -> typer.Typer:
    """The application with all commands that are there.

    Args:
        rich_help: draw help in panels. Importing what that needs takes as long as everything else together,
            and the short list of commands reads as well without.
    """
    app = typer.Typer(
        name="layertap",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if rich_help else None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_EPILOG,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
        ] = False,
        verbose: Annotated[
            bool, typer.Option("--verbose", "-v", help="Show the log, and tracebacks of errors.")
        ] = False,
    ) -> None:
        """Hidden states of language models at the speed the model can prefill."""
        if verbose:
            os.environ[DEBUG_VARIABLE] = "1"
        configure_logging()

    app.command("extract", epilog=extract.EPILOG)(extract.extract)
    app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
    app.command("verify", epilog=verify.EPILOG)(verify.verify)
    for name in _OPTIONAL:
        if importlib.util.find_spec(f"layertap.commands.{name}") is not None:
            module = importlib.import_module(f"layertap.commands.{name}")
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            app.command(name, context_settings=settings)(getattr(module, name))
    return app


def normalise(arguments: Sequence[str]) -> list[str]:
    """Spell flags with ``-``: ``--max_tokens=3`` is ``--max-tokens=3``. Values stay, and all after ``--``."""
    result: list[str] = []
    for i, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[i:]]
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            argument = flag.replace("_", "-") + equals + value
        result.append(argument)
    return result


def _names_command(arguments: Sequence[str]) -> bool:
    return any(not argument.startswith("-") for argument in arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # PyTorch reads it with its first tensor: large ones in huge pages, which saves a few percent on a CPU.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not any(word in _OWN_FLAGS for word in given[:1]):
        given = normalise(given)
    try:
        result = build_app(rich_help=_names_command(given))(
            args=given, prog_name="layertap", standalone_mode=False
        )
    except _ClickError as e:
        return _report_usage(e)
    except InvalidInputError as e:
        return _report(e, 2)
    except (KeyboardInterrupt, typer.Abort):
        print_error(_GO_ON)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:  # noqa: BLE001 - the last resort of a program: told in one line
        return _report(e, 1)
    if result == INTERRUPTED:  # typer has caught it already
        print_error(_GO_ON)
    return result if isinstance(result, int) else 0


def _report_usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        if error.format_message():
            print(error.format_message())
        return 2
    command = context.command_path if context is not None else "layertap"
    print_error(f"{error.format_message()} (see {command} --help)")
    return 2 if isinstance(error, _UsageError) else 1


def _report(error: Exception, status: int) -> int:
    if debugging():
        import traceback

        traceback.print_exception(error)
    text = str(error).strip() or type(error).__name__
    expected = type(error).__module__.startswith("layertap")
    print_error(text if expected else f"{type(error).__name__}: {text} (--verbose shows where)")
    return status


if __name__ == "__main__":
    sys.exit(main())
