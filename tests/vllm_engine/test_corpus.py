"""Datasets through vLLM: what is kept, made again and refused is as with the torch engine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from layertap import InvalidInputError, SamplingParams, cli
from layertap.commands.engine_options import ENGINE_OPTIONS, TORCH_ONLY, VLLM_OPTIONS
from layertap.config import EngineConfig
from layertap.corpus import CorpusResult, CorpusSummary, extract_corpus, verify_corpus
from layertap.record import read_record
from vllm_engine.support import HAS_VLLM, SHAPES, WHY_NOT

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not HAS_VLLM, reason=WHY_NOT)]

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256,
}  # fmt: skip
FLAGS = [
    "--engine", "vllm", "--dtype", "float32", "--skip-tokenizer-init", "--kv-cache-memory-bytes",
    str(16 << 20), "--max_model_len", "256",
]  # fmt: skip
PROMPTS: list[Any] = [{"id": f"p{i}", "prompt_token_ids": list(range(3, 8 + 3 * i))} for i in range(5)]
Extract = Callable[..., tuple[CorpusSummary, dict[str, CorpusResult]]]


@pytest.fixture
def model(tiny: Callable[..., str]) -> str:
    return tiny("llama", **SHAPES["llama"])


@pytest.fixture
def extract(model: str, tmp_path: Path) -> Extract:
    def run(prompts: Any = PROMPTS, **kwargs: Any) -> tuple[CorpusSummary, dict[str, CorpusResult]]:
        results: list[CorpusResult] = []
        options = {"layers": "4,1,-1", "engine": "vllm", **OPTIONS, **kwargs}
        summary = extract_corpus(model, prompts, tmp_path / "out", on_result=results.append, **options)
        return summary, {r.id or str(r.index): r for r in results}

    return run


def files(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def test_a_run_goes_on_where_it_stopped_and_makes_broken_records_again(
    extract: Extract, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    wrong = [{"id": "w0", "prompt_token_ids": [9999]}, {"id": "w1", "prompt_token_ids": [3] * 300}]
    summary, results = extract([*PROMPTS, *wrong])
    assert (summary.written, summary.failed, summary.layers) == (5, 2, "4,1,5")
    assert "9999" in (results["w0"].reason or "")
    assert "max_model_len" in (results["w1"].reason or "")
    assert files(out) == {f"p{i}.safetensors" for i in range(5)}  # no lock, no error file
    for prompt in PROMPTS:
        record = read_record(results[prompt["id"]].path or "")
        assert record.token_ids.tolist() == prompt["prompt_token_ids"]
        assert record.layer_ids == (4, 1, 5)
        right = reference.states(model, prompt["prompt_token_ids"])[:, [4, 1, 5]]
        reference.assert_states(record.hidden_states, right)

    os.truncate(out / "p0.safetensors", (out / "p0.safetensors").stat().st_size - 100)
    data = bytearray((out / "p1.safetensors").read_bytes())
    data[-20] ^= 1
    (out / "p1.safetensors").write_bytes(data)
    (out / "p2.safetensors").unlink()
    (out / ".layertap-1-0123456789abcdef-0.tmp").write_bytes(b"half")
    summary, results = extract()
    assert (summary.remade, summary.written, summary.kept, summary.leftovers_removed) == (2, 1, 2, 1)
    assert "cut off" in (results["p0"].reason or "")
    assert "damaged" in (results["p1"].reason or "")
    assert files(out) == {f"p{i}.safetensors" for i in range(5)}
    assert all(status.ok for status in verify_corpus(out))

    # The other engine goes on with the same folder, and refuses it for another run, as this one does.
    other = {"engine": "torch", "device": "cpu"}
    assert extract(**other)[0].kept == 5
    for engine in (other, {}):
        with pytest.raises(InvalidInputError, match=r"output: .*layer_ids 4,1,5, not 2.*--overwrite"):
            extract(layers="2", **engine)
    assert len(files(out)) == 5


def test_selection_dtype_and_generated_tokens(extract: Extract, model: str) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"sampling_params": sampling, "include_output_tokens": True}
    summary, results = extract(storage_dtype="float16", **options)
    assert summary.written == 5
    record = read_record(results["p0"].path or "")
    assert record.hidden_states.dtype == torch.float16
    ids = record.token_ids.tolist()
    assert len(ids) == results["p0"].num_rows == 5 + 6 - 1
    reference.assert_states(record.hidden_states, reference.states(model, ids)[:, [4, 1, 5]], 1e-3)
    summary, results = extract(storage_dtype="float16", tokens=[-1, 0], overwrite=True, **options)
    assert summary.written == 5
    assert read_record(results["p1"].path or "").token_ids.tolist()[1] == PROMPTS[1]["prompt_token_ids"][0]
    assert extract(storage_dtype="float16", tokens=[-1, 0], limit=3, **options)[0].kept == 3


def test_what_only_one_engine_knows_is_refused_by_name(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    theirs = {f.name for f in dataclasses.fields(EngineArgs)}
    ours = {f.name for f in dataclasses.fields(EngineConfig)} - {"layers"}
    assert ours - theirs == set(TORCH_ONLY)
    assert set(VLLM_OPTIONS) <= theirs - set(ENGINE_OPTIONS)
    common = ["extract", model, "--prompts", "-", "--layers", "1", "--output", str(tmp_path / "out")]
    for flags, told in (
        (["--engine", "vllm", "--device", "cpu"], "--device: got 'cpu'; allowed: nothing with --engine vllm"),
        (["--engine", "vllm", "--no-self-check"], "--self-check: got False"),
        (["--engine", "vllm", "--extract-only"], "--extract-only: got True"),
        (["--engine", "torch", "--quantization", "fp8"], "--quantization: got 'fp8'"),
        (["--pipeline_parallel_size", "2"], "only --engine vllm knows it"),
        (["--engine", "tensorrt"], "--engine: got 'tensorrt'; allowed: 'torch' or 'vllm'"),
    ):
        assert cli.main([*common, *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
    assert not (tmp_path / "out").exists()
    for options, named in (
        ({"device": "cpu"}, "device: got 'cpu'; allowed: nothing with engine='vllm'"),
        ({"extract_only": True}, "extract_only"),
        ({"max_model_length": 9}, "max_model_length: .*did you mean 'max_model_len'"),
        ({"layers": "norm"}, "layers: got 'norm'"),
        (
            {"data_parallel_size": 2},
            "data_parallel_size: got 2; allowed: 1 here; 'layertap serve --engine vllm'",
        ),
    ):
        with pytest.raises(InvalidInputError, match=named):
            extract_corpus(model, [[5]], tmp_path / "o", **{"layers": "1", "engine": "vllm", **options})


def own_words(text: str) -> list[str]:
    """Standard error without what each of the CPU build's processes says before it reads its log level."""
    return [line for line in text.splitlines() if not line.startswith("Triton is installed, but")]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"p{i}", "prompt_token_ids": [3 + i % 150, 3 + i // 150, *range(3, 153)]} for i in range(400)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_prints_its_table_and_tells_what_failed_with_status_1(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write('{"id": "bad", "prompt_token_ids": [3, -1]}\n')
    arguments = ["extract", model, "--prompts", str(prompts), "--layers", "0,3", "-o", str(tmp_path / "out")]
    assert cli.main([*arguments, *FLAGS, "--tokens", "last"]) == 1
    captured = capsys.readouterr()
    assert "400 written" in captured.out
    assert "layers 0,3" in captured.out
    # Beside what vLLM logs in this process, where a test has imported it before.
    bad, final = [line for line in captured.err.splitlines() if line.startswith("layertap: ")]
    assert "prompts.jsonl:401" in bad
    assert "1 of 401 prompts failed" in final
    assert len(files(tmp_path / "out")) == 400


@pytest.mark.slow
def test_the_command_in_processes_of_its_own_killed_and_run_again(
    python: str, model: str, prompts: Path, tmp_path: Path
) -> None:
    """As a user runs it: vLLM's core and worker are processes, which must not outlive a killed command."""
    out = tmp_path / "out"
    command = [
        python, "-m", "layertap.cli", "extract", model, "--prompts", str(prompts), "--layers", "all",
        "--output", str(out), "--output-format", "json", *FLAGS, "--max-num-seqs", "8",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    for variable in ("VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND"):
        environment.pop(variable, None)  # what the command itself chooses is to be seen
    ends = ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130))
    for (signal_number, status), enough in zip(ends, (5, 60), strict=True):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
            # A shell that runs the tests in the background has its children ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        deadline = time.monotonic() + 120
        while not out.is_dir() or sum(n.endswith(".safetensors") for n in os.listdir(out)) < enough:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if signal_number == signal.SIGINT:
            os.killpg(process.pid, signal_number)  # as a terminal does, to vLLM's processes too
        else:
            process.kill()
        stdout, err = process.communicate(timeout=60)  # until nobody holds its standard output any more
        assert process.returncode == status, err
        if signal_number == signal.SIGINT:
            *before, last = own_words(err)
            assert last == "layertap: interrupted; run the same command again to go on"
            # Said where vLLM takes longer than a second to end.
            assert before in ([], ["layertap: ending with the step that runs; Ctrl-C again: at once"])
            assert all(
                json.loads(line)["id"] for line in stdout.splitlines()
            )  # vLLM prints nothing in between
    done = sum(name.endswith(".safetensors") for name in os.listdir(out))
    assert done < 400
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # starts in half the time
    result = subprocess.run(command, capture_output=True, env=environment, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[-1]["summary"]["kept"] == done
    assert lines[-1]["summary"]["written"] == 400 - done
    assert own_words(result.stderr) == []
    assert files(out) == {f"p{i}.safetensors" for i in range(400)}
    assert all(status.ok for status in verify_corpus(out))
