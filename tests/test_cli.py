"""The command line, as its users meet it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layertap import cli
from layertap.commands.engine_options import ENGINE_OPTIONS
from layertap.commands.extract import parse_tokens_flag
from layertap.commands.interrupt import ends_in_order
from layertap.config import EngineConfig
from layertap.errors import InvalidInputError

LAYERTAP = [sys.executable, "-m", "layertap.cli"]
SMALL = ["--skip-tokenizer-init", "--kv-cache-memory-bytes", str(16 << 20), "--max-model-len", "256"]


def run(*arguments: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAYERTAP, *map(str, arguments)], capture_output=True, text=True, **kwargs)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt_token_ids": [3 + i] * 9}) + "\n" for i in range(4))
    )
    return path


def extract(model: str, prompts: Path, out: Path) -> int:
    arguments = ["extract", model, "--prompts", str(prompts), "--layers=1,-1", "-o", str(out), *SMALL]
    return cli.main(arguments)


@pytest.fixture
def states(tiny: Callable[..., str], prompts: Path, tmp_path: Path) -> Path:
    out = tmp_path / "states"
    assert (
        cli.main(
            ["extract", tiny("llama"), "--prompts", str(prompts), "--layers=1,-1", "-o", str(out), *SMALL]
        )
        == 0
    )
    return out


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("layertap: ")
    return lines[0]


def test_help_imports_no_torch() -> None:
    code = """
import sys
from layertap.cli import main
for arguments in ("--help", "extract --help", "inspect --help", "verify --help", "--version"):
    assert main(arguments.split()) == 0
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "heavy imports for a page of help"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Examples" in result.stdout


def test_every_field_of_the_configuration_has_a_flag() -> None:
    assert set(ENGINE_OPTIONS) == {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "layers"}


def test_flags_are_taken_with_either_sign() -> None:
    given = ["--max_tokens=a_b", "--output_format", "x_y", "-v", "--", "--a_b"]
    assert cli.normalise(given) == ["--max-tokens=a_b", "--output-format", "x_y", "-v", "--", "--a_b"]


def test_token_selections_of_the_command_line() -> None:
    assert parse_tokens_flag("last") == "last"
    assert parse_tokens_flag("-8:") == {"start": -8, "end": None}
    assert parse_tokens_flag("2:5") == {"start": 2, "end": 5}
    assert parse_tokens_flag("0,5,-1") == [0, 5, -1]
    with pytest.raises(InvalidInputError, match="--tokens"):
        parse_tokens_flag("some")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "extract" in capsys.readouterr().out


ONE = ["extract", "m", "--layers", "1", "--output", "o"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["extarct"], "extarct"),
        (["extract", "m"], "--layers"),
        (ONE, "--prompt"),
        ([*ONE, "--prompt", "a", "--prompts", "b"], "exactly one"),
        ([*ONE, "--prompt", "a", "--layer", "2"], "--layer"),
        ([*ONE, "--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
        ([*ONE, "--prompt", "a", "--tokens", "some"], "--tokens"),
        ([*ONE, "--prompt", "a", "--storage-dtype", "int4"], "int4"),
        ([*ONE, "--prompt", "a", "--output-format", "xml"], "xml"),
        ([*ONE, "--prompt", "a", "--prompts-format", "xml"], "xml"),
        ([*ONE, "--prompt", "a", "--include-output-tokens"], "max-tokens"),
        ([*ONE, "--prompts", "none.jsonl"], "none.jsonl"),
        ([*ONE, "--prompt", "a", "--engine", "tensorrt"], "--engine: got 'tensorrt'"),
        (
            [*ONE, "--prompt", "a", "--engine", "vllm", "--device", "cpu"],
            "--device: got 'cpu'; allowed: nothing",
        ),
        ([*ONE, "--prompt", "a", "--quantization", "fp8"], "--quantization: got 'fp8'; allowed: nothing"),
        (["inspect", "none"], "none"),
        (["inspect", ".", "--plot", "x.xyz"], "--plot"),
        (["verify", "none"], "none"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert told in error_of(capsys)


def test_jsonl_in_a_text_file_is_refused_before_a_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.txt"
    path.write_text('{"prompt": "a"}\n' * 5)
    out = tmp_path / "states"
    command = ["extract", "/no/such/model", "--prompts", str(path), "--layers", "1", "-o", str(out)]
    assert cli.main(command) == 2
    told = error_of(capsys)
    assert "train.txt" in told
    assert "--prompts-format (prompts_format) jsonl" in told
    assert not out.exists()
    for chosen in ("jsonl", "text"):  # then it is the model that is wrong
        assert cli.main([*command, "--prompts-format", chosen]) == 2
        assert "/no/such/model" in error_of(capsys)


def test_wrong_models_layers_and_folders_exit_with_2(
    tiny: Callable[..., str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def extract(
        model: str = tiny("llama"), layers: str = "1", output: Path = tmp_path / "o", *more: str
    ) -> str:
        arguments = [
            "extract",
            model,
            "--prompts",
            str(prompts),
            "--layers",
            layers,
            "-o",
            str(output),
            *SMALL,
            *more,
        ]
        assert cli.main(arguments) == 2
        return error_of(capsys)

    assert "from 0 to 5" in extract(layers="6")
    assert "/no/such" in extract(model="/no/such")
    (tmp_path / "empty").mkdir()
    assert "config.json" in extract(model=str(tmp_path / "empty"))
    assert "can be written" in extract(output=prompts / "below")
    assert "dtype" in extract(tiny("llama"), "1", tmp_path / "o", "--dtype", "int3")
    assert "tensor_parallel_size" in extract(
        tiny("llama"), "1", tmp_path / "o", "--tensor-parallel-size", "2"
    )


def test_extract_prints_a_table_and_keeps_what_is_complete(
    tiny: Callable[..., str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract(tiny("llama"), prompts, tmp_path / "o") == 0
    assert "4 written" in capsys.readouterr().out
    assert extract(tiny("llama"), prompts, tmp_path / "o") == 0
    captured = capsys.readouterr()
    assert "4 kept" in captured.out
    assert "tokens/s" in captured.out
    assert captured.err == ""


def test_json_gives_a_line_for_each_prompt_and_a_bad_line_exits_with_1(
    tiny: Callable[..., str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(prompts, "a") as file:
        file.write('{"prompt_token_ids": [1, 2\n')
    out = tmp_path / "states"
    arguments = [
        "extract",
        tiny("llama"),
        "--prompts",
        str(prompts),
        "--layers",
        "0,norm",
        "--output",
        str(out),
    ]
    assert cli.main([*arguments, *SMALL, "--tokens", "-2:", "--output_format=json"]) == 1
    captured = capsys.readouterr()
    *lines, last = [json.loads(line) for line in captured.out.splitlines()]
    assert sorted(line["index"] for line in lines) == [0, 1, 2, 3, 4]
    stored = [line for line in lines if line["status"] == "written"]
    assert all(Path(line["path"]).is_file() for line in stored)
    assert {(line["tokens"], line["rows"]) for line in stored} == {(9, 2)}
    assert {line["id"] for line in stored} == {f"p{i}" for i in range(4)}
    assert last["summary"]["written"] == 4
    assert last["summary"]["failed"] == 1
    assert last["summary"]["layers"] == "0,norm"
    bad, final = captured.err.splitlines()
    assert "prompts.jsonl:5" in bad
    assert "1 of 5 prompts failed" in final


def test_a_pipe_of_prompts_into_a_real_process(tiny: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "states"
    result = run(
        "extract", tiny("llama"), "--prompts", "-", "--layers", "all", "--output", out, *SMALL,
        "--output-format",
        "json", input='{"prompt_token_ids": [5, 6, 7]}\n',
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert json.loads(result.stdout.splitlines()[0])["tokens"] == 3


def test_inspect_shows_tables_json_and_pictures(
    states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["inspect", str(states), "--plot", str(tmp_path / "map.png"), "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert "p0" in out
    assert "ok" in out
    assert "1 more files" in out
    assert (tmp_path / "map.png").stat().st_size > 5000
    assert cli.main(["inspect", str(states / "p1.safetensors"), "--output-format", "json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["tokens"], line["layers"], line["dtype"], line["checksum"]) == (
        9,
        ["1", "5"],
        "float32",
        "ok",
    )
    assert line["outlier"]["layer"] in (1, 5)


def test_broken_files_are_told_by_inspect_and_verify(
    states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["verify", str(states)]) == 0
    assert "4 intact, 0 broken" in capsys.readouterr().out
    path = states / "p2.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert cli.main(["verify", str(states)]) == 1
    captured = capsys.readouterr()
    assert "p2.safetensors: cut off" in captured.out
    assert "1 of 4 files are broken" in captured.err
    assert cli.main(["verify", str(states), "--output-format", "json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["summary"] == {"intact": 3, "broken": 1, "without_checksums": 0}
    assert cli.main(["inspect", str(states)]) == 1
    assert "broken" in capsys.readouterr().out
    assert cli.main(["inspect", str(path), "--output-format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_folder_without_records_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert "at least one" in error_of(capsys)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "at least one" in error_of(capsys)


def test_an_unexpected_error_is_one_line_and_a_traceback_on_request(
    states: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("layertap.corpus.records.verify_corpus", fail)
    capsys.readouterr()
    assert cli.main(["verify", str(states)]) == 1
    assert "RuntimeError: first line second line" in error_of(capsys)
    monkeypatch.setenv("LAYERTAP_DEBUG", "1")
    assert cli.main(["verify", str(states)]) == 1
    assert "Traceback" in capsys.readouterr().err


SLOW_TO_END = """
import time
from layertap.commands.interrupt import ends_in_order
with ends_in_order():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(60)
"""


def test_a_second_ctrl_c_ends_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_END],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    told = process.stderr.readline()
    assert told == "layertap: ending with the step that runs; Ctrl-C again: at once\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "layertap: ended at once\n"


def test_where_interrupts_are_ignored_they_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ends_in_order():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_exits_with_130_and_one_line(tiny: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "states"
    command = ["extract", tiny("llama"), "--prompts", "-", "--layers", "all", "--output", str(out), *SMALL]
    process = subprocess.Popen(
        [*LAYERTAP, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdin is not None
    process.stdin.write('{"prompt_token_ids": [5, 6, 7]}\n' * 2)
    process.stdin.flush()  # and it stays open: the command waits for more
    deadline = time.monotonic() + 120
    while not out.is_dir() or not any(name.startswith(".layertap") for name in os.listdir(out)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == ["layertap: interrupted; run the same command again to go on"]
    assert not any(name.startswith(".layertap") for name in os.listdir(out))
