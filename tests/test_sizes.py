from __future__ import annotations

from typing import Any

import pytest

from layertap import cli
from layertap.errors import InvalidInputError
from layertap.server import flags
from layertap.sizes import parse_size

ENGINE_SIZES = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes")
EXTRACT = ["extract", "m", "--layers", "1", "--output", "o", "--prompt", "a"]
BENCH = ["bench", "--suite", "prefix"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096), ("1k", 1000), ("1K", 1024), ("1Ki", 1024), ("1ki", 1024), ("1KiB", 1024),
        ("1kB", 1000), ("2 M", 2 << 20), ("1.5g", 1_500_000_000), ("1.5G", 3 << 29), ("2GiB", 2 << 30),
        ("1t", 10**12), ("1T", 1 << 40), ("0.3K", 307), ("1_000", 1000), ("+7", 7), ("512B", 512), ("0", 0),
        ("9007199254740993", 2**53 + 1), ("9007199254740993k", (2**53 + 1) * 1000),
    ],
)  # fmt: skip
def test_sizes_are_whole_numbers_or_have_a_unit(text: str, count: int) -> None:
    assert parse_size(text, "--x") == count


@pytest.mark.parametrize("text", ["", "many", "1.5", "4i", "4iB", "k", "1 k k", "1e6", "1KK", "nan", "0x10"])
def test_what_is_no_size_is_refused_with_what_is_one(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^--x: got '.*'; allowed: a whole number, .* 64k .* 64K"):
        parse_size(text, "--x")


def test_a_size_has_a_least_value() -> None:
    for text in ("0", "-1", "0.5"):
        with pytest.raises(InvalidInputError, match="--x: got"):
            parse_size(text, "--x", least=1)
    with pytest.raises(InvalidInputError, match="0 or more"):
        parse_size("-1", "--x")
    assert parse_size("0.5k", "--x", least=1) == 500


@pytest.mark.parametrize(("text", "count"), [("300", 300), ("1k", 1000), ("1K", 1024), ("1.5K", 1536)])
@pytest.mark.parametrize("flag", ENGINE_SIZES)
def test_extract_and_serve_take_the_same_sizes(
    flag: str, text: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "layertap.commands.extract._run",
        lambda model, prompts, output, sampling, options, as_json: given.update(options),
    )
    name = flag[2:].replace("-", "_")
    assert cli.main([*EXTRACT, flag, text]) == 0
    assert given[name] == count
    assert getattr(flags.parse(["m", flag, text]), name) == count


@pytest.mark.parametrize("text", ["many", "0", "-3", "4i"])
@pytest.mark.parametrize("flag", ENGINE_SIZES)
def test_extract_and_serve_refuse_the_same_sizes_in_the_same_words(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*EXTRACT, flag, text]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"layertap: {flag}: got '{text}'; allowed: ")
    with pytest.raises(InvalidInputError) as refused:
        flags.parse(["m", flag, text])
    assert told == f"layertap: {refused.value}\n"


def test_the_servers_own_sizes_keep_their_defaults_and_may_be_nothing() -> None:
    args = flags.parse(["m", "--max-inline-bytes", "0"])
    assert (args.max_body_bytes, args.max_inline_bytes, args.max_bytes) == (64 << 20, 0, None)
    assert flags.parse(["m"]).max_inline_bytes == 16 << 20


def test_bench_takes_them_for_counts_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def run_suite(name: str, workload: Any, *rest: Any) -> Any:
        taken.append(workload)
        return {}

    monkeypatch.setattr("layertap.bench.suites.run_suite", run_suite)
    monkeypatch.setattr("layertap.bench.report.summary", lambda result: "")
    sizes = ["--min-tokens", "1k", "--max-tokens", "1K", "--token-budget", "2K"]
    assert cli.main([*BENCH, *sizes]) == 0
    assert (taken[0].min_tokens, taken[0].max_tokens, taken[0].token_budget) == (1000, 1024, 2048)
    assert cli.main(BENCH) == 0
    assert (taken[1].min_tokens, taken[1].max_tokens, taken[1].token_budget) == (16, 900, 4096)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-tokens", "many"], "--max-tokens: got 'many'; allowed: a whole number"),
        (["--min-tokens", "1K", "--max-tokens", "1k"], "--max-tokens: got '1k'; allowed: at least"),
        (["--token-budget", "15"], "--token-budget: got '15'; allowed: 16 or more"),
    ],
)
def test_bench_refuses_wrong_ones(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*BENCH, *arguments]) == 2
    assert told in capsys.readouterr().err
