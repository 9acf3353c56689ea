"""Extraction of a dataset with a tiny model: what is kept, what is made again, what is refused."""

from __future__ import annotations

import errno
import itertools
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
import torch

import reference
from layertap import InvalidInputError, SamplingParams
from layertap.corpus import CorpusResult, CorpusSummary, extract_corpus, iter_records, verify_corpus
from layertap.record import read_record
from layertap.sinks.file import FileSink

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256, "device": "cpu",
}  # fmt: skip
PROMPTS: list[Any] = [{"id": f"p{i}", "prompt_token_ids": list(range(3, 8 + 3 * i))} for i in range(5)]
Extract = Callable[..., tuple[CorpusSummary, dict[str, CorpusResult]]]


@pytest.fixture
def extract(tiny: Callable[..., str], tmp_path: Path) -> Extract:
    def run(prompts: Any = PROMPTS, **kwargs: Any) -> tuple[CorpusSummary, dict[str, CorpusResult]]:
        results: list[CorpusResult] = []
        model = kwargs.pop("model", None) or tiny("llama")
        options = {"layers": "1,-1", **OPTIONS, **kwargs}
        summary = extract_corpus(model, prompts, tmp_path / "out", on_result=results.append, **options)
        return summary, {r.id or str(r.index): r for r in results}

    return run


def files(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.endswith(".lock")}


def test_states_are_those_of_the_model(extract: Extract, tiny: Callable[..., str], tmp_path: Path) -> None:
    summary, results = extract(layers="1,3")
    assert (summary.written, summary.prompts, summary.tokens) == (5, 5, sum(5 + 3 * i for i in range(5)))
    assert files(tmp_path / "out") == {f"p{i}.safetensors" for i in range(5)}
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama")).eval()
    for prompt in PROMPTS:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.inference_mode():
            expected = model(ids, output_hidden_states=True).hidden_states
        record = read_record(results[prompt["id"]].path or "")
        assert record.layer_ids == (1, 3)
        reference.assert_states(record.hidden_states[:, 0], expected[1][0])
        reference.assert_states(record.hidden_states[:, 1], expected[3][0])


def test_complete_records_are_kept_and_broken_ones_made_again(extract: Extract, tmp_path: Path) -> None:
    """Case 12: a file cut off, one with a flipped bit, one that is missing, one that is no record at all."""
    extract()
    out = tmp_path / "out"
    times = {name: (out / name).stat().st_mtime_ns for name in files(out)}
    cut, flipped, gone, other = (out / f"p{i}.safetensors" for i in range(4))
    os.truncate(cut, cut.stat().st_size - 100)
    data = bytearray(flipped.read_bytes())
    data[-20] ^= 1
    flipped.write_bytes(data)
    gone.unlink()
    other.write_text("not a record")
    (out / ".layertap-1-0123456789abcdef-0.tmp").write_bytes(b"half")
    summary, results = extract()
    assert (summary.remade, summary.written, summary.kept, summary.leftovers_removed) == (3, 1, 1, 1)
    assert {k: r.status for k, r in results.items()} == {
        "p0": "remade", "p1": "remade", "p2": "written", "p3": "remade", "p4": "kept",
    }  # fmt: skip
    assert "cut off" in (results["p0"].reason or "")
    assert "damaged" in (results["p1"].reason or "")
    assert (out / "p4.safetensors").stat().st_mtime_ns == times["p4.safetensors"]
    assert files(out) == {f"p{i}.safetensors" for i in range(5)}
    assert all(status.ok for status in verify_corpus(out))


def test_a_record_of_another_prompt_under_the_same_id_is_made_again(extract: Extract) -> None:
    extract()
    same_length = [
        {"id": "p0", "prompt_token_ids": [9] * 5},
        {"id": "p1", "prompt_token_ids": [9]},
        PROMPTS[2],
    ]
    summary, results = extract(same_length)
    assert (summary.remade, summary.kept) == (2, 1)
    assert read_record(results["p0"].path or "").token_ids.tolist() == [9] * 5


def test_another_token_selection_is_refused_unless_overwritten(extract: Extract) -> None:
    extract()
    for tokens in ("last", slice(-2, None), [0], {"start": 1}):
        with pytest.raises(
            InvalidInputError, match=r"output: .* rows of a prompt of .*--tokens.*--overwrite"
        ):
            extract(tokens=tokens)
    assert extract()[0].kept == 5, "nothing was lost"
    summary, results = extract(tokens="last", overwrite=True)
    assert (summary.written, summary.foreign_removed) == (5, 5)
    assert results["p3"].num_rows == 1
    assert extract(tokens="last")[0].kept == 5
    assert extract(tokens=[-1])[0].kept == 5, "the same by another name"


def test_a_selection_that_does_not_fit_a_prompt_fails_that_prompt_also_where_a_record_is(
    extract: Extract,
) -> None:
    extract(tokens=[0])
    summary, results = extract(tokens=[9], overwrite=True)
    assert (summary.failed, summary.written, summary.foreign_removed) == (2, 3, 5)
    assert "positions from -5 to 4" in (results["p0"].reason or "")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": "2"}, "layer_ids 1,5, not 2"),
        ({"storage_dtype": "bfloat16"}, "storage_dtype float32, not bfloat16"),
        ({"model": "qwen2"}, "model '.*', not '.*'"),
    ],
)
def test_a_folder_of_another_run_is_refused_unless_overwritten(
    extract: Extract, tiny: Callable[..., str], tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    extract()
    if "model" in changes:
        changes = {"model": tiny(changes["model"])}
    with pytest.raises(InvalidInputError, match=f"output: .*{told}.*--overwrite"):
        extract(PROMPTS[:2], **changes)
    assert len(files(tmp_path / "out")) == 5
    summary, _ = extract(PROMPTS[:2], overwrite=True, **changes)
    assert (summary.written + summary.remade, summary.foreign_removed) == (2, 5)
    assert files(tmp_path / "out") == {"p0.safetensors", "p1.safetensors"}


def test_overwrite_makes_every_record_again(extract: Extract, tmp_path: Path) -> None:
    extract()
    before = (tmp_path / "out" / "p0.safetensors").stat().st_mtime_ns
    assert extract(overwrite=True)[0].written == 5
    assert (tmp_path / "out" / "p0.safetensors").stat().st_mtime_ns != before


def test_wrong_prompts_fail_alone_and_name_their_lines(extract: Extract, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        '{"prompt_token_ids": [3, 4]}', "{oops", '{"prompt_token_ids": []}', '{"prompt_token_ids": [9999]}',
        json.dumps({"prompt_token_ids": [3] * 300}), '{"prompt": "needs a tokenizer"}',
        '{"prompt_token_ids": [5]}',
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    summary, results = extract(path)
    assert (summary.written, summary.failed) == (2, 5)
    told = {r.where: r.reason or "" for r in results.values() if r.status == "failed"}
    assert list(told) == [f"p.jsonl:{n}" for n in range(2, 7)]
    for reason, part in zip(
        told.values(), ("JSON", "at least one", "9999", "max_model_len", "tokenizer"), strict=True
    ):
        assert part in reason
    assert len(summary.failures) == 5


def test_generated_tokens_can_be_kept_and_such_a_run_goes_on(extract: Extract) -> None:
    options = {
        "sampling_params": SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False),
        "include_output_tokens": True,
    }
    summary, results = extract(**options)
    assert summary.written == 5
    assert results["p0"].num_rows == 5 + 6 - 1
    assert extract(**options)[0].kept == 5
    for tokens in ([-1, 0], {"start": 2}):
        assert extract(tokens=tokens, overwrite=True, **options)[0].written == 5
        assert extract(tokens=tokens, **options)[0].kept == 5
    with pytest.raises(InvalidInputError, match="--overwrite"):
        extract(include_output_tokens=False)
    assert extract(include_output_tokens=False, overwrite=True)[0].written == 5


def test_float8_records_go_on_too(extract: Extract) -> None:
    extract(storage_dtype="float8_e4m3fn")
    assert extract(storage_dtype="float8_e4m3fn")[0].kept == 5


def test_limit_stops_early_and_the_rest_follows_later(extract: Extract) -> None:
    assert extract(limit=2)[0].prompts == 2
    summary, _ = extract()
    assert (summary.kept, summary.written) == (2, 3)


def test_wrong_arguments_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    def run(prompts: Any = "/none", output: Any = tmp_path / "o", **kwargs: Any) -> None:
        extract_corpus("/no/such/model", prompts, output, layers="1", **kwargs)

    with pytest.raises(InvalidInputError, match="limit"):
        run(limit=0)
    with pytest.raises(InvalidInputError, match="tokens"):
        run(tokens="some")
    with pytest.raises(InvalidInputError, match=r"prompts: .*No such file"):
        run()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"output: .*can be written"):
        run([[1]], tmp_path / "file" / "below")


def test_no_prompts_is_wrong_input(extract: Extract) -> None:
    with pytest.raises(InvalidInputError, match="at least one prompt"):
        extract([])


def test_killed_at_any_moment_a_run_ends_with_one_valid_file_for_each_prompt(
    tiny: Callable[..., str], tmp_path: Path
) -> None:
    """A real SIGKILL, twice, at moments that differ; then the same command to its end."""
    count = 400
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    with open(prompts, "w") as file:
        for i in range(count):
            ids = [3 + i % 150, 3 + i // 150, *range(3, 23 + i % 50)]
            file.write(json.dumps({"prompt_token_ids": ids}) + "\n")
    command = [
        sys.executable, "-m", "layertap.cli", "extract", tiny("llama"), "--prompts", str(prompts),
        "--layers", "all", "--skip-tokenizer-init", "--output", str(out), "--output-format", "json",
        "--max-num-seqs", "8",
    ]  # fmt: skip
    for enough in (5, 120):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not out.is_dir() or sum(n.endswith(".safetensors") for n in os.listdir(out)) < enough:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = sum(name.endswith(".safetensors") for name in os.listdir(out))
    assert done < count
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(result.stdout.splitlines()[-1])["summary"]
    assert summary["kept"] == done
    assert summary["written"] == count - done
    assert len(os.listdir(out)) == count
    records = list(iter_records(out, verify=True))
    assert len({tuple(r.token_ids.tolist()) for r in records}) == count


@pytest.mark.parametrize("space_for", [0, 3])
def test_a_run_stops_where_there_is_no_space(
    space_for: int, extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is not computed for nothing; the same run goes on when there is space again."""
    prompts = [{"id": f"p{i}", "prompt_token_ids": [3 + i, 5, 7]} for i in range(100)]
    taken: list[str] = []

    def some() -> Any:
        for prompt in prompts:
            taken.append(prompt["id"])
            yield prompt

    with monkeypatch.context() as patch:
        fill_up(patch, space_for)
        summary, results = extract(some(), max_num_seqs=4)
    assert summary.stopped == "no space for 8 records in a row"
    assert summary.written == space_for
    assert 8 <= summary.failed < 30
    assert len(taken) < 60
    assert len(files(tmp_path / "out")) == space_for
    assert all("make room" in r.reason for r in results.values() if r.status == "failed" and r.reason)
    summary, _ = extract(prompts)
    assert (summary.stopped, summary.kept, summary.written) == (None, space_for, 100 - space_for)


def test_a_run_goes_on_where_some_records_find_space(
    extract: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"id": f"p{i}", "prompt_token_ids": [3 + i, 5, 7]} for i in range(40)]
    fill_up(monkeypatch, every=5)
    summary, _ = extract(prompts, max_num_seqs=1)
    assert (summary.stopped, summary.written, summary.failed) == (None, 8, 32)


def fill_up(patch: pytest.MonkeyPatch, space_for: int = 0, every: int = 1 << 30) -> None:
    """A disk with space for so many records, or for each n-th one."""
    count = itertools.count(1)
    publish, open_ = FileSink.publish, FileSink.open

    def is_full() -> bool:
        number = next(count)
        return number > space_for and number % every != 0

    def no_space() -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def some_published(self: FileSink, records: Any) -> list[Any]:
        return [no_space() if is_full() else publish(self, [record])[0] for record in records]

    def opened(self: FileSink, spec: Any) -> Any:
        if is_full():
            raise no_space()
        return open_(self, spec)

    patch.setattr(FileSink, "publish", some_published)
    patch.setattr(FileSink, "open", opened)
