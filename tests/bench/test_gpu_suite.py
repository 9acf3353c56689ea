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


def test_rows_run_over_all_of_the_engines_own_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command over rows that share processes: files, memory, extract_only, the server, starts; without
    vLLM, whose ways are left out."""
    path = tmp_path / "gpu.json"
    flags = [
        "--rows",
        "a,c,d,e,h,i",
        "--repeat",
        "1",
        "--threads",
        "1",
        "--output",
        str(path),
        "--scale-down",
    ]
    assert main(["bench", "--suite", "gpu", *flags, "--vllm-python", str(tmp_path / "no-python")]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("missing: no vllm and layertap") == 5
    assert "D: extract_only runs the layers below" in captured.out
    assert "TFLOP/s in a 256 x 256 x 256 matrix product" in captured.out
    assert "vLLM's ways are left out" in captured.err
    assert captured.err.count(": starting\n") == 6  # H has two, of which one goes on with A, E and I
    document = json.loads(path.read_text())
    assert document["partial"] == {}
    assert list(document["rows"]) == list("ACDEHI")
    for letter, entry in document["rows"].items():
        row = scaled_down(ROWS[letter])
        assert set(entry["ways"]) == {way for way in row.ways if way.startswith("layertap")}
        assert list(entry["left_out"]) == [way for way in row.ways if way.startswith("vllm")]
        assert entry["machine"]["versions"]["torch"]
        for way, outcome in entry["ways"].items():
            assert "error" not in outcome, outcome
            if row.measure == "rate":
                assert outcome["tokens_per_second"]["median"] > 0
                assert outcome["states_bytes"] == row.states_bytes(way)
                assert 0 < outcome["mfu"] < 1
                assert len(outcome["runs"]) == 1
    empty, filled = document["rows"]["H"]["ways"]["layertap"]["starts"]
    assert (empty["caches"], filled["caches"]) == ("empty", "filled")
    assert empty["seconds"] > empty["start_seconds"] > 0
    for letter in "CI":
        (ratio,) = document["rows"][letter]["ratios"]
        assert ratio["ratio"] > 0


def test_a_way_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """The row after it, which wanted the same process, gets another one; last-token states among them."""
    (tmp_path / "work").mkdir()
    short = scaled_down(ROWS["A"])
    last = scaled_down(ROWS["K"])
    long = dataclasses.replace(short, letter="B", prompts=Prompts(1, 600))  # more than the model takes
    results = Results(tmp_path / "gpu.json", "layertap bench")
    notes: list[str] = []
    options = GpuOptions(
        ("layertap", "layertap-memory", "transformers"), 1, threads=1, folder=tmp_path / "work",
        any_device=True, matmul_size=64,
    )  # fmt: skip
    run_gpu([long, short, last], options, results, notes.append)
    found = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert "max_model_len" in found["B"]["ways"]["layertap"]["causes"][0]
    assert "Traceback" in (tmp_path / "gpu-B-layertap.log").read_text()
    assert found["A"]["ways"]["layertap"]["tokens_per_second"]["median"] > 0
    assert found["A"]["ways"]["transformers"]["states_bytes"] == short.states_bytes("transformers")
    assert found["A"]["ratios"][-1]["ratio"] > 0
    assert (
        found["K"]["ways"]["layertap-memory"]["states_bytes"] == 4 * 3 * 64 * 4
    )  # of 4 prompts' last tokens
    assert list((tmp_path / "work").glob("files*")) == []
    assert any("failed" in note for note in notes)


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
