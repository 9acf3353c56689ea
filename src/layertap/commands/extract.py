"""``layertap extract``: prompts in, one file of hidden states for each prompt out."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layertap.commands.engine_options import check_engine, with_engine_options
from layertap.commands.output import CommandFailedError, check_output_format, print_error, print_json
from layertap.errors import InvalidInputError

if TYPE_CHECKING:
    from layertap.corpus.extract import CorpusResult, CorpusSummary
    from layertap.sampling_params import SamplingParams

_SLICE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_LINE_SECONDS = 30.0  # between two lines of progress in a log
_ROWS_SHOWN = 12
_TOKENS_ALLOWED = "all, last, a slice like 0:16 or -8:, or positions like 0,5,-1"
_GENERATION = "Generation"

EPILOG = (
    "Examples:\n\n"
    "layertap extract smollm2 --prompt 'The future of AI is' --layers eagle3 --output states\n\n"
    "layertap extract Qwen/Qwen3-8B --prompts train.jsonl --layers 3,18,33,36 --output states\n\n"
    "cut -f2 corpus.tsv | layertap extract Qwen/Qwen3-8B --prompts - --layers -1 --tokens last -o states\n\n"
    "Run the same command again after an interruption: complete files are kept."
)


def parse_tokens_flag(text: str) -> Any:
    """``all``, ``last``, ``a:b`` or ``0,5,-1`` as the Python API takes it."""
    if text in ("all", "last"):
        return text
    match = _SLICE.fullmatch(text)
    if match:
        start, end = (int(part) if part is not None else None for part in match.groups())
        return {"start": start, "end": end}
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError("--tokens", text, _TOKENS_ALLOWED) from None


@with_engine_options
def extract(
    model: Annotated[
        str,
        typer.Argument(help="Hugging Face id, local folder or .gguf file; 'smollm2' is a small one to try."),
    ],
    layers: Annotated[
        str,
        typer.Option(
            help="Which states to keep: k is after k layers (0: the embeddings, -1: after the last one), "
            "'norm' after the final norm, 'all', or 'eagle3'. Several are separated by commas.",
            metavar="IDS",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the .safetensors files.", metavar="DIR")
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt's text; give it again for more prompts.", metavar="TEXT"),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="File of prompts: .jsonl lines with 'prompt', 'prompt_token_ids' or 'messages' (and perhaps "
            "an 'id', which names the file), or text with one prompt a line; - is standard input.",
            metavar="FILE",
        ),
    ] = None,
    prompts_format: Annotated[
        str,
        typer.Option(
            help="auto goes by the file's suffix, on standard input by the first character; or jsonl, text.",
            metavar="FORMAT",
        ),
    ] = "auto",
    limit: Annotated[
        int | None, typer.Option(help="Stop after this many prompts.", min=1, metavar="N")
    ] = None,
    tokens: Annotated[
        str, typer.Option(help=f"Which tokens' states to keep: {_TOKENS_ALLOWED}.", metavar="TOKENS")
    ] = "all",
    storage_dtype: Annotated[
        str,
        typer.Option(
            help="Of the states in the file: auto (the model's), float32, bfloat16, float16, float8_e4m3fn.",
            metavar="DTYPE",
        ),
    ] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Make every file again; remove another run's files from DIR.")
    ] = False,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Flush each file to the disk before it gets its name.")
    ] = False,
    output_format: Annotated[
        str, typer.Option(help="text, or json: a line for each prompt and one at the end.", metavar="FORMAT")
    ] = "text",
    max_tokens: Annotated[
        int,
        typer.Option(help="Also generate this many tokens.", min=0, metavar="N", rich_help_panel=_GENERATION),
    ] = 0,
    include_output_tokens: Annotated[
        bool,
        typer.Option(
            "--include-output-tokens",
            help="Keep the generated tokens' states too (all but the last token's).",
            rich_help_panel=_GENERATION,
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", min=0.0, rich_help_panel=_GENERATION)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from this share of the likeliest tokens.", rich_help_panel=_GENERATION),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample from the k likeliest tokens; 0: all.", rich_help_panel=_GENERATION)
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Generate on after an end token.", rich_help_panel=_GENERATION),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(help="torch, or vllm: vLLM itself with our connector in it.", metavar="ENGINE"),
    ] = "torch",
    **options: Any,
) -> None:
    """Write the hidden states of prompts to files, one for each prompt."""
    check_output_format(output_format)
    check_engine(engine, options)
    if (prompt is None) == (prompts is None):
        raise InvalidInputError(
            "--prompt/--prompts",
            None if prompt is None else "both",
            "exactly one of them: --prompt TEXT or --prompts FILE",
        )
    tokens_spec = parse_tokens_flag(tokens)
    from layertap.corpus.prompts import FORMATS, check_source
    from layertap.selection import STORAGE_DTYPES

    if storage_dtype not in STORAGE_DTYPES:
        raise InvalidInputError("--storage-dtype", storage_dtype, ", ".join(STORAGE_DTYPES))
    if prompts_format not in FORMATS:
        raise InvalidInputError("--prompts-format", prompts_format, ", ".join(FORMATS))
    if include_output_tokens and max_tokens == 0:
        raise InvalidInputError("--include-output-tokens", True, "only together with --max-tokens above 0")
    if prompts is not None:
        check_source(prompts, prompts_format)
    from layertap.sampling_params import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=ignore_eos,
        detokenize=False,
    )  # fmt: skip
    options |= {
        "layers": layers, "tokens": tokens_spec, "storage_dtype": storage_dtype, "limit": limit,
        "include_output_tokens": include_output_tokens, "prompts_format": prompts_format,
        "overwrite": overwrite, "fsync": fsync, "engine": engine,
    }  # fmt: skip
    _run(model, prompt or prompts or "-", output, sampling, options, as_json=output_format == "json")


def _run(
    model: str,
    prompts: str | list[str],
    output: Path,
    sampling: SamplingParams,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    from layertap.commands.interrupt import ends_in_order
    from layertap.commands.quiet import quiet_libraries

    with quiet_libraries(), ends_in_order():
        from layertap.corpus.extract import extract_corpus, make_folder
        from layertap.corpus.prompts import count_lines
        from layertap.progress import Progress

        make_folder(output)
        total = len(prompts) if isinstance(prompts, list) else count_lines(prompts)
        limit = options["limit"]
        if total is not None and limit is not None:
            total = min(total, limit)
        shown: list[CorpusResult] = []
        terminal = sys.stderr.isatty()
        if options["engine"] == "vllm":
            options = {"use_tqdm_on_load": terminal, **options}
        if terminal:
            print(f"loading {model} ...", file=sys.stderr)
        progress: Progress | None = None

        def started(_: object) -> None:
            nonlocal progress
            progress = Progress(total, shown=terminal, every=None if terminal else _LINE_SECONDS)
            progress.__enter__()

        def tell(result: CorpusResult) -> None:
            if result.status == "failed":
                print_error(f"{result.where}: {result.reason}")
            elif result.status == "remade":
                print_error(f"{result.path}: made again ({result.reason})")
            assert progress is not None
            computed = result.status in ("written", "remade")
            progress.advance(result.num_tokens if computed else 0, result.num_bytes if computed else 0)
            if as_json:
                print_json(_line(result))
            elif len(shown) < _ROWS_SHOWN:
                shown.append(result)

        try:
            summary = extract_corpus(
                model, prompts, output, sampling_params=sampling, on_start=started,
                on_result=tell, **options,
            )  # fmt: skip
        finally:
            if progress is not None:
                progress.__exit__(None, None, None)
    if as_json:
        counts = {k: v for k, v in asdict(summary).items() if k != "failures"}
        rate = round(summary.tokens_per_second, 1)
        print_json({"summary": {"prompts": summary.prompts, **counts, "tokens_per_second": rate}})
    else:
        _print_table(summary, shown)
    if summary.stopped is not None:
        raise CommandFailedError(
            f"stopped, with {summary.written + summary.remade} files written: {summary.stopped}; make room "
            "and run the same command again: it goes on from there"
        )
    if summary.failed:
        raise CommandFailedError(
            f"{summary.failed} of {summary.prompts} prompts failed; correct them as told above and run the "
            "same command again: complete files are kept"
        )


def _line(result: CorpusResult) -> dict[str, Any]:
    """A prompt's line of JSON; what there is nothing to say of is left out."""
    line: dict[str, Any] = {"index": result.index, "where": result.where, "id": result.id}
    line |= {"status": result.status, "path": result.path, "reason": result.reason}
    if result.path is not None:
        line |= {"tokens": result.num_tokens, "rows": result.num_rows, "bytes": result.num_bytes}
    return {name: value for name, value in line.items() if value is not None}


def _print_table(summary: CorpusSummary, shown: list[CorpusResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    from layertap.engine.memory import format_bytes

    console = Console()
    table = Table("prompt", "status", "file (.safetensors)", title=f"hidden states in {summary.output}")
    for name in ("tokens", "rows", "size"):
        table.add_column(name, justify="right")
    for r in shown:
        if r.status != "failed":
            table.add_row(
                r.where, r.status, Path(r.path or "").stem, f"{r.num_tokens:,}", f"{r.num_rows:,}",
                format_bytes(r.num_bytes),
            )  # fmt: skip
        else:
            table.add_row(r.where, r.status, "", "", "", "")
    if summary.prompts > len(shown):
        table.add_row("...", "", f"and {summary.prompts - len(shown):,} more", "", "", "")
    console.print(table)
    counts = [f"{summary.written:,} written", f"{summary.kept:,} kept"]
    counts += [f"{summary.remade:,} made again"] if summary.remade else []
    counts += [f"{summary.failed:,} failed"] if summary.failed else []
    counts += [f"{summary.leftovers_removed:,} leftovers removed"] if summary.leftovers_removed else []
    counts += [f"{summary.foreign_removed:,} of another run removed"] if summary.foreign_removed else []
    console.print(
        f"{', '.join(counts)}; layers {summary.layers}; {summary.tokens:,} tokens in {summary.seconds:.1f} s "
        f"({summary.tokens_per_second:,.0f} tokens/s), {format_bytes(summary.bytes_written)} written",
        highlight=False,
    )
