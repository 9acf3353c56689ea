"""The gpu suite runs for real, each way in its process, on a CPU with tiny models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from layertap.bench.gpu.results import Results
from layertap.bench.gpu.rows import ROWS, Prompts, scaled_down
from layertap.bench.gpu.run import GpuOptions, run_gpu
from layertap.cli import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures tiny models on a CPU")


def _options(folder: Path, *ways: str, repeat: int = 1) -> GpuOptions:
    return GpuOptions(
        ways, repeat, str(folder / "no-python"), threads=1, folder=folder / "work", any_device=True,
        matmul_size=64,
    )  # fmt: skip


def test_rows_run_over_all_of_the_engines_own_ways(tmp_path: Path) -> None:
    """One command over rows that share processes: files, memory, extract_only, the server, starts."""
    (tmp_path / "work").mkdir()
    rows = [scaled_down(ROWS[letter]) for letter in "ACDEHIK"]
    own = {way for row in rows for way in row.ways if way.startswith("layertap")}
    path = tmp_path / "gpu.json"
    notes: list[str] = []
    run_gpu(rows, _options(tmp_path, *sorted(own)), Results(path, "layertap bench"), notes.append)
    document = json.loads(path.read_text())
    assert document["partial"] == {}
    ways = {letter: entry["ways"] for letter, entry in document["rows"].items()}
    assert {letter: list(found) for letter, found in ways.items()} == {
        row.letter: [way for way in sorted(own) if way in row.ways] for row in rows
    }
    for row in rows:
        for way, outcome in ways[row.letter].items():
            assert "error" not in outcome, outcome
            if row.measure == "rate":
                assert outcome["tokens_per_second"]["median"] > 0
                assert outcome["states_bytes"] == row.states_bytes(way)
                assert 0 < outcome["mfu"] < 1
                assert len(outcome["runs"]) == 1
    assert ways["K"]["layertap-memory"]["states_bytes"] == 4 * 3 * 64 * 4  # prompts, layers, hidden, float32
    empty, filled = ways["H"]["layertap"]["starts"]
    assert (empty["caches"], filled["caches"]) == ("empty", "filled")
    assert empty["seconds"] > empty["start_seconds"] > 0
    for letter in "CI":
        (ratio,) = document["rows"][letter]["ratios"]
        assert ratio["ratio"] > 0
    assert sum(note.endswith(": starting") for note in notes) == 8  # A, E and I share one process
    assert list((tmp_path / "work").glob("files*")) == []


def test_a_way_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    short = scaled_down(ROWS["A"])
    long = dataclasses.replace(short, letter="B", prompts=Prompts(1, 600))  # more than the model takes
    results = Results(tmp_path / "gpu.json", "layertap bench")
    notes: list[str] = []
    run_gpu([long, short], _options(tmp_path, "layertap", "transformers"), results, notes.append)
    found = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert "600" in found["B"]["ways"]["layertap"]["error"]
    assert found["A"]["ways"]["layertap"]["tokens_per_second"]["median"] > 0
    assert found["A"]["ways"]["transformers"]["states_bytes"] == short.states_bytes("transformers")
    assert found["A"]["ratios"][-1]["ratio"] > 0
    assert any("failed" in note for note in notes)


def test_vllm_is_left_out_where_it_cannot_be_imported_and_the_table_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.json"
    arguments = ["--rows", "a", "--repeat", "1", "--threads", "1", "--output", str(output), "--scale-down"]
    nowhere = str(tmp_path / "no-python")
    assert main(["bench", "--suite", "gpu", *arguments, "--vllm-python", nowhere]) == 0
    captured = capsys.readouterr()
    assert "missing: " in captured.out
    assert "vLLM's ways are left out" in captured.err
    entry = json.loads(output.read_text())["rows"]["A"]
    assert list(entry["ways"]) == ["layertap"]
    assert list(entry["left_out"]) == ["vllm-no-extraction", "vllm-connector"]
    assert entry["machine"]["versions"]["torch"]


def test_a_time_limit_ends_it_between_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    arguments = ["--rows", "C", "--repeat", "1", "--output", str(output), "--scale-down"]
    assert main(["bench", "--suite", "gpu", *arguments, "--time-limit", "20"]) == 0
    error = capsys.readouterr().err
    assert "out of time" in error
    assert "C: not measured: layertap-memory, layertap-no-extraction" in error
    assert not output.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--suite", "gpu", "--rows", "A,Q"],
            "--rows: got 'Q'; allowed: one of A, B, C, D, E, F, G, H, I, J, K",
        ),
        (["--suite", "gpu", "--peers", "vllm-conector"], "did you mean 'vllm-connector'"),
        (["--suite", "gpu", "--num-prompts", "3"], "--num-prompts"),
        (["smollm2", "--suite", "gpu"], "MODEL"),
        (["--suite", "gpu", "--output-format", "xml"], "--output-format"),
        (["--rows", "A"], "--rows"),
        (["--time-limit", "5"], "--time-limit"),
        (["--suite", "gpus"], "did you mean 'gpu'"),
        (["--suite", "gpu", "--rows", "A"], "finds no GPU"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err
