"""``layertap bench``: the same prompts through this engine and its peers, in one run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

_OF_ROWS = (
    "model", "layers", "num_prompts", "min_tokens", "max_tokens", "dtype", "token_budget", "compiled",
)  # fmt: skip
"""What the gpu suite's rows say, and no flag."""
_OF_GPU = ("rows", "time_limit", "scale_down")


def bench(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Model to measure with: a folder, a hub id or 'smollm2'.")
    ] = "smollm2",
    suite: Annotated[
        str,
        typer.Option(
            help="cpu: all peers; prefix: prefix caching; memory: few against many prompts; "
            "gpu: the rows of a table, each against what it has to keep up with."
        ),
    ] = "cpu",
    rows: Annotated[
        str | None, typer.Option(help="gpu: rows to measure, such as A,B; default: all.", metavar="LETTERS")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="gpu: seconds after which it ends, with what was measured.", min=1, metavar="SECONDS"
        ),
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers to extract: ids, 'all' or 'eagle3'.")] = "3,15,27,30",
    peers: Annotated[
        str | None, typer.Option(help="Which ways to measure, separated by commas; default: all.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 96,
    min_tokens: Annotated[str, typer.Option(help="Shortest prompt.", metavar="SIZE")] = "16",
    max_tokens: Annotated[
        str, typer.Option(help="Longest prompt (1k = 1000, 1K = 1024).", metavar="SIZE")
    ] = "900",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    token_budget: Annotated[str, typer.Option(help="Tokens a step.", metavar="SIZE")] = "4096",
    repeat: Annotated[int, typer.Option(help="Measured runs of each way, after a warm-up.", min=1)] = 3,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the engine's layers; default: where the CPU has matrix units for the dtype.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="OpenMP threads; default: the libraries' own choice.", min=1)
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option(help="The Python that has vLLM, if it is not this one.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the result as JSON to this file; gpu: row by row, into what it holds."),
    ] = None,
    output_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    scale_down: Annotated[
        bool, typer.Option("--scale-down", hidden=True, help="gpu: tiny models and few prompts.")
    ] = False,
) -> None:
    """Measure tokens/s, time to the first file and peak memory, side by side with transformers and vLLM.

    Each way has a process of its own and runs the same random prompts in turns. The workload is stated with
    the result, so that anyone can repeat it.
    """
    from layertap.commands.bench_gpu import SUITE, bench_gpu

    _refuse(context, _OF_ROWS if suite == SUITE else _OF_GPU, suite)
    if suite == SUITE:
        bench_gpu(rows, peers, repeat, time_limit, threads, vllm_python, output, output_format, scale_down)
        return
    from rich.console import Console
    from rich.table import Table

    from layertap.bench import report
    from layertap.bench.machine import has_matrix_units
    from layertap.bench.suites import PEERS, SUITES, BenchOptions, base_workload, run_suite
    from layertap.config import nearest
    from layertap.errors import InvalidInputError
    from layertap.sizes import parse_size

    if suite not in SUITES:
        raise InvalidInputError("--suite", suite, nearest(suite, (*SUITES, SUITE)))
    chosen = tuple(peers.split(",")) if peers else PEERS
    for name in chosen:
        if name not in PEERS:
            raise InvalidInputError("--peers", name, nearest(name, PEERS))
    shortest, longest = parse_size(min_tokens, "--min-tokens", 1), parse_size(max_tokens, "--max-tokens", 1)
    if longest < shortest:
        raise InvalidInputError("--max-tokens", max_tokens, f"at least --min-tokens ({min_tokens})")
    console = Console(stderr=True)
    workload = base_workload(
        model,
        layers=layers,
        num_prompts=num_prompts,
        min_tokens=shortest,
        max_tokens=longest,
        dtype=dtype,
        token_budget=parse_size(token_budget, "--token-budget", 16),
        compiled=compiled if compiled is not None else has_matrix_units(dtype),
    )
    console.print(workload.describe(), highlight=False)
    options = BenchOptions(chosen, repeat, vllm_python or sys.executable, threads)
    command = shlex.join(["layertap", *sys.argv[1:]])
    result = run_suite(suite, workload, options, command, lambda text: console.print(text, highlight=False))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    if output_format == "json":
        print(json.dumps(result))
        return
    if "peers" not in result:
        print(report.summary(result))
        return
    table = Table(*report.COLUMNS, title=f"{workload.dtype} on {result['machine']['cpu']}")
    for row in report.rows(result):
        table.add_row(*row)
    out = Console()
    if not out.is_terminal:  # a file or a pipe is as wide as the table
        out = Console(width=140)
    out.print(table)


def _refuse(context: typer.Context, names: tuple[str, ...], suite: str) -> None:
    """Refuse options that a suite would not heed.

    Raises:
        InvalidInputError: one of them was given.
    """
    from layertap.errors import InvalidInputError

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[0] if parameter.opts[0].startswith("-") else "MODEL"
            raise InvalidInputError(flag, context.params[parameter.name], f"nothing with --suite {suite}")
