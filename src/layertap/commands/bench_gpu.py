"""``layertap bench --suite gpu``: the rows, the result file and the table."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SUITE = "gpu"


def bench_gpu(
    rows: str | None,
    peers: str | None,
    repeat: int,
    time_limit: float | None,
    threads: int | None,
    vllm_python: str | None,
    output: Path | None,
    output_format: str,
    scale_down: bool,
) -> None:
    """Measure rows of the ``gpu`` suite; see :func:`layertap.commands.bench.bench` for the arguments.

    Raises:
        InvalidInputError: an unknown row or way, a result file of something else, or no GPU.
    """
    from layertap.bench.gpu.results import Results
    from layertap.bench.gpu.rows import choose_rows, choose_ways, scaled_down
    from layertap.bench.gpu.run import GpuOptions, run_gpu
    from layertap.commands.output import check_output_format, print_json

    check_output_format(output_format)
    chosen = choose_rows(rows)
    ways = choose_ways(peers, chosen)
    results = Results(output, shlex.join(["layertap", *sys.argv[1:]]))
    options = GpuOptions(ways, repeat, vllm_python or sys.executable, threads, time_limit)
    if scale_down:
        chosen = [scaled_down(row) for row in chosen]
        options = GpuOptions(
            ways, repeat, options.vllm_python, threads, time_limit, any_device=True, matmul_size=256
        )
    begun = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {text}", file=sys.stderr, flush=True)

    for row in chosen:
        note(f"{row.letter}: {row.describe()}")
    with _ended_by_sigterm():
        run_gpu(chosen, options, results, note)
    if output_format == "json":
        print_json(results.document)
    else:
        _print_table(results.document, [row.letter for row in chosen])


def _print_table(document: dict[str, object], letters: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from layertap.bench.gpu import table

    shown = Table(*table.COLUMNS)
    for line in table.lines(document, letters):
        shown.add_row(*line)
    out = Console()
    if not out.is_terminal:  # a file or a pipe is as wide as the table
        out = Console(width=400)
    out.print(shown)
    for text in table.notes(document, letters):
        out.print(text, highlight=False)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the measurement as Ctrl-C does: with its processes and its files."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
