"""The benchmark runs its peers for real, on a tiny model, and says what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from layertap.bench import report
from layertap.bench.machine import describe_machine
from layertap.bench.peers import run_peers
from layertap.bench.process import PeerFailedError
from layertap.bench.workload import Workload
from layertap.cli import main

SMALL = ["--layers", "0,2,4", "--num-prompts", "3", "--min-tokens", "2", "--max-tokens", "9", "--repeat", "1"]
OWN = "torch,torch-no-extraction,transformers,transformers-batched"


def test_a_workload_is_the_same_everywhere_and_survives_json(tmp_path: Path) -> None:
    workload = Workload("m", (0, 2), num_prompts=5, shared_prefix=3, seed=7)
    (tmp_path / "w.json").write_text(json.dumps(workload.to_json()))
    again = Workload.read(tmp_path / "w.json")
    assert again == workload
    assert again.prompts == workload.prompts
    assert len({tuple(p[:3]) for p in workload.prompts}) == 1
    assert workload.num_tokens == sum(map(len, workload.prompts))


def test_all_own_peers_run_and_the_result_names_machine_and_workload(
    tiny: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results" / "cpu.json"
    arguments = [
        "bench",
        tiny("llama"),
        *SMALL,
        "--peers",
        OWN,
        "--dtype",
        "float32",
        "--output",
        str(output),
    ]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "transformers, one by one" in table
    result = json.loads(output.read_text())
    assert list(result["peers"]) == OWN.split(",")
    for peer in result["peers"].values():
        assert peer["tokens_per_second"]["median"] > 0
        assert peer["peak_rss_bytes"] > 10**7
    assert result["peers"]["torch"]["first_file_seconds"] > 0
    assert result["machine"]["versions"]["torch"]
    assert result["workload"]["layers"] == [0, 2, 4]
    assert report.markdown(result).count("\n") == 5


@pytest.mark.parametrize("suite", ["prefix", "memory"])
def test_the_other_suites_print_one_line(
    suite: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from layertap.bench import suites

    # The same suites with fewer prompts: what they measure is the benchmark's affair, not the test's.
    measure = suites._measure

    def fewer(workload: Workload, *rest: object) -> object:
        import dataclasses

        small = dataclasses.replace(workload, num_prompts=4, shared_prefix=min(workload.shared_prefix, 32))
        return measure(small, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(suites, "_measure", fewer)
    assert main(["bench", tiny("llama"), *SMALL, "--suite", suite, "--dtype", "float32"]) == 0
    assert {"prefix": "prefix caching: ", "memory": "peak memory: "}[suite] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suite", "gpus"], "--suite"),
        (["--peers", "torhc"], "did you mean 'torch'"),
        (["--layers", "9"], "layers"),
        (["--min-tokens", "20"], "--max-tokens"),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], message: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", tiny("llama"), *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_dies_is_told_with_what_it_said(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path / "nothing"), (0,), num_prompts=1)
    with pytest.raises(PeerFailedError, match="nothing"):
        run_peers(workload, ["transformers"], 1, tmp_path / "out")


def test_vllm_is_left_out_where_it_is_not_installed(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["bench", tiny("llama"), *SMALL, "--peers", "transformers,vllm", "--dtype", "float32"]
    assert main([*arguments, "--vllm-python", str(tmp_path / "no-python"), "--output-format", "json"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out.splitlines()[-1])["peers"]) == ["transformers"]
    assert "vllm is left out" in captured.err


def test_the_machine_is_described() -> None:
    facts = describe_machine()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 10**8
