"""``layertap inspect``: what is in a record, as a table, as JSON, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layertap.commands.output import CommandFailedError, check_output_format, print_error, print_json
from layertap.errors import InvalidInputError

if TYPE_CHECKING:
    from layertap.corpus.records import RecordStatus
    from layertap.corpus.statistics import RecordStatistics

_NORMS_SHOWN = 6
_FILE_WIDTH = 120  # of a table that goes to a file or a pipe
EPILOG = "Examples:\n\nlayertap inspect states\n\nlayertap inspect states/req-1.safetensors --plot norms.png"


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A .safetensors file, or a folder of them.", metavar="FILE_OR_DIR")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw tokens x layers of the states' norms (of a folder's first intact file) to this "
            ".png, .svg or .pdf.",
            metavar="FILE",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Look at this many files only.", min=1, metavar="N")
    ] = None,
    output_format: Annotated[
        str, typer.Option(help="text, or json: a line for each file.", metavar="FORMAT")
    ] = "text",
) -> None:
    """Show each file's tokens, layers, norms, largest value and checksum."""
    check_output_format(output_format)
    if plot is not None:
        from layertap.corpus.plot import require_matplotlib

        require_matplotlib(plot)
    from layertap.corpus.records import check_record, record_paths

    paths = record_paths(path)
    if not paths:
        raise InvalidInputError("FILE_OR_DIR", str(path), "a folder with at least one .safetensors file")
    table = _Table(str(path)) if output_format == "text" else None
    broken = 0
    for name in paths[:limit]:
        status = check_record(name)
        statistics = None
        if status.ok:
            statistics, status = _statistics(status)
        broken += not status.ok
        if table is not None:
            table.add(status, statistics)
        else:
            print_json(_as_json(status, statistics))
        if statistics is not None and plot is not None:
            _plot(status, statistics, plot)
            drawn, plot = plot, None
            if table is not None:
                table.notes.append(f"heat map of {Path(name).name}: {drawn}")
    if table is not None:
        left = len(paths) - len(paths[:limit])
        if left:
            table.notes.append(f"{left:,} more files were not looked at (--limit)")
        table.print()
    if broken:
        raise CommandFailedError(
            f"{broken} of {len(paths[:limit])} files are broken; run the extraction again to make them again"
        )
    if plot is not None:
        print_error(f"no picture was drawn: none of the files in {path} is intact")


def _statistics(status: RecordStatus) -> tuple[RecordStatistics | None, RecordStatus]:
    from layertap.corpus.records import RecordStatus
    from layertap.corpus.statistics import record_statistics
    from layertap.errors import CorruptRecordError
    from layertap.record import read_record

    try:
        return record_statistics(read_record(status.path, verify=False)), status
    except CorruptRecordError as e:
        return None, RecordStatus(status.path, None, e.problem)
    except ValueError as e:
        return None, RecordStatus(status.path, None, str(e))


def _layer_names(status: RecordStatus) -> list[str]:
    assert status.check is not None
    listed = status.check.metadata.get("layer_ids")
    return listed.split(",") if listed else [f"column {i}" for i in range(status.check.shape[1])]


def _dtype(status: RecordStatus) -> str:
    assert status.check is not None
    return str(status.check.dtype).removeprefix("torch.")


def _as_json(status: RecordStatus, statistics: RecordStatistics | None) -> dict[str, Any]:
    if status.check is None or statistics is None:
        return {"path": status.path, "ok": False, "problem": status.problem}
    outlier = statistics.outlier
    return {
        "path": status.path,
        "ok": True,
        "checksum": "ok" if status.check.checksummed else "none",
        "model": status.check.metadata.get("model"),
        "tokens": status.check.shape[0],
        "layers": _layer_names(status),
        "hidden_size": status.check.shape[2],
        "dtype": _dtype(status),
        "mean_norms": [round(x, 4) for x in statistics.mean_norms],
        "outlier": {
            "value": outlier.value,
            "layer": outlier.layer_id,
            "position": outlier.position,
            "dimension": outlier.dimension,
        },
    }


def _plot(status: RecordStatus, statistics: RecordStatistics, path: Path) -> None:
    from layertap.corpus.plot import plot_norms
    from layertap.record import parse_positions

    assert status.check is not None
    metadata = status.check.metadata
    listed = metadata.get("positions")
    positions = parse_positions(listed) if listed is not None else range(status.check.shape[0])
    file_name = Path(status.path).name
    model = metadata.get("model", "unknown model")
    title = f"{file_name}\n{model}: {len(positions):,} tokens, {_dtype(status)}"
    plot_norms(statistics.norms.numpy(), _layer_names(status), positions, title, path)


class _Table:
    """One row for each file."""

    def __init__(self, title: str) -> None:
        from rich import box
        from rich.table import Table

        self.notes: list[str] = []
        self._models: set[str] = set()
        self._table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
        self._table.add_column("file (.safetensors)", overflow="fold", min_width=12)
        for name in ("tokens", "layers", "dtype"):
            self._table.add_column(name, justify="right", no_wrap=True)
        self._table.add_column("layer: mean norm")
        self._table.add_column("largest |x|")
        self._table.add_column("checksum", overflow="fold")

    def add(self, status: RecordStatus, statistics: RecordStatistics | None) -> None:
        from rich.markup import escape

        name = escape(Path(status.path).stem)
        if status.check is None or statistics is None:
            self._table.add_row(name, "", "", "", "", "", f"[red]broken[/]: {escape(status.problem or '')}")
            return
        self._models.add(status.check.metadata.get("model", "unknown"))
        names = _layer_names(status)
        outlier = statistics.outlier
        self._table.add_row(
            name,
            f"{status.check.shape[0]:,}",
            str(status.check.shape[1]),
            _dtype(status),
            _norms(names, statistics.mean_norms),
            f"{_number(abs(outlier.value))} in layer {names[outlier.column]}\n"
            f"at position {outlier.position:,}",
            "[green]ok[/]" if status.check.checksummed else "none in the file",
        )

    def print(self) -> None:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _FILE_WIDTH)
        if self._models:
            self._table.caption = f"model: {', '.join(sorted(self._models))}"
        console.print(self._table)
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


def _norms(names: list[str], means: list[float]) -> str:
    """``"3: 41.2  18: 97.5"``: at most six layers, spread over all of them, two a line."""
    count = len(means)
    shown = list(range(count))
    if count > _NORMS_SHOWN:
        shown = [round(i * (count - 1) / (_NORMS_SHOWN - 1)) for i in range(_NORMS_SHOWN)]
    width = max(len(names[i]) for i in shown)
    cells = [f"{names[i]:>{width}}: {_number(means[i]):<7}" for i in shown]
    return "\n".join(" ".join(cells[i : i + 2]).rstrip() for i in range(0, len(cells), 2))
