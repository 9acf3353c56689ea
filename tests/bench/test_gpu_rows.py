"""The gpu suite's rows as data: shapes, prompts, operations, and the ratios of a result file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from layertap.bench.gpu import table
from layertap.bench.gpu.engine import Engine, Start, Task, max_model_len
from layertap.bench.gpu.results import Results
from layertap.bench.gpu.rows import ROWS, WAYS, Prompts, choose_rows, choose_ways, scaled_down
from layertap.bench.gpu.shapes import QWEN3_06B, QWEN3_8B, ModelShape
from layertap.errors import InvalidInputError


@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN3_06B])
def test_a_shape_is_a_model_that_transformers_builds_with_the_weights_that_are_counted(
    shape: ModelShape, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(shape.write(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert matrices == shape.num_hidden_layers * shape.layer_weights
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.tie_word_embeddings == shape.tie_word_embeddings
    assert config.dtype == torch.bfloat16


def test_mfu_is_counted_as_in_the_published_measurements() -> None:
    # 41,337 tokens/s of 2048-token prompts are 0.77 of 775 to 788 TFLOP/s.
    per_token = QWEN3_8B.prefill_flops([(0, 2048)]) / 2048
    assert 41337 * per_token / 788e12 < 0.775 < 41337 * per_token / 775e12 + 0.01
    whole = QWEN3_8B.prefill_flops([(0, 100)])
    assert QWEN3_8B.prefill_flops([(0, 60), (60, 100)]) == whole
    assert QWEN3_8B.prefill_flops([(0, 100)], num_layers=18) == whole / 2


def test_prompts_are_the_same_everywhere_and_have_the_lengths_that_the_row_says() -> None:
    lengths = ROWS["E"].prompts.lengths()
    assert lengths == ROWS["E"].prompts.lengths()
    assert len(lengths) == 512
    assert 700 < sorted(lengths)[256] < 900
    assert max(lengths) <= 8192
    cached = ROWS["F"].prompts
    first, again, other = cached.token_ids(1000), cached.token_ids(1000), cached.token_ids(1000, run=1)
    assert first == again
    assert {len(p) for p in first} == {1152}
    assert len({tuple(p[:1024]) for p in first}) == 1
    assert len({tuple(p) for p in first}) == 256
    assert first[0][:1024] != other[0][:1024]
    assert cached.spans()[:2] == [(0, 1152), (1024, 1152)]
    same = ROWS["A"].prompts
    assert same.token_ids(1000, run=1)[0] == same.token_ids(1000, run=2)[0]


def test_every_row_names_known_ways_its_own_first() -> None:
    assert "".join(ROWS) == "ABCDEFGHIJK"
    for row in ROWS.values():
        assert {*row.ways, *row.optional} <= set(WAYS)
        assert row.ways[0].startswith("layertap")
        assert max(row.layer_ids) <= row.shape.num_hidden_layers
    assert len(ROWS["C"].layer_ids) == 37
    assert ROWS["D"].flops("layertap-extract-only") == ROWS["D"].flops("vllm-connector") / 2
    assert ROWS["K"].states_bytes("layertap-memory") * 64 == ROWS["K"].states_bytes("vllm-connector")


def test_rows_with_equal_settings_share_an_engine_that_takes_the_longest_of_their_prompts() -> None:
    a, e, f, g = (ROWS[letter] for letter in "AEFG")
    assert Engine.of(a, "layertap") == Engine.of(e, "layertap") == Engine.of(g, "layertap")
    assert Engine.of(a, "layertap") != Engine.of(f, "layertap")
    assert Engine.of(a, "layertap") != Engine.of(a, "vllm-connector")
    assert max_model_len([a]) == 4096
    assert max_model_len([a, g]) == 32768 + 16


def test_what_a_process_is_told_survives_json() -> None:
    engine = Engine.of(ROWS["A"], "layertap")
    start = Start(engine, "/models/x", 4096, "/dev/shm/x", 4096, 2, 151936, "cuda")
    assert Start.from_json(json.loads(json.dumps(start.to_json()))) == start
    task = Task(Prompts(9, 10), 3, "all", 1, most_tokens=25)
    again = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert again == task
    assert [len(p) for p in again.token_ids(500)] == [10, 10, 10]


def test_wrong_rows_and_ways_are_named() -> None:
    assert [row.letter for row in choose_rows(" b,A,b")] == ["B", "A"]
    assert len(choose_rows(None)) == 11
    with pytest.raises(InvalidInputError, match="--rows: got 'Z'; allowed: one of A, B, C"):
        choose_rows("A,Z")
    with pytest.raises(InvalidInputError, match="--rows"):
        choose_rows(",")
    assert choose_ways("vllm-layertap,layertap", [ROWS["A"]]) == ("vllm-layertap", "layertap")
    with pytest.raises(InvalidInputError, match="did you mean 'vllm-connector'"):
        choose_ways("vllm-conector", [ROWS["A"]])
    with pytest.raises(InvalidInputError, match="--peers: got 'layertap-server'"):
        choose_ways("layertap-server", [ROWS["A"]])


def _rate(median: float, **more: Any) -> dict[str, Any]:
    return {"tokens_per_second": {"min": median - 1, "median": median, "max": median + 1}, **more}


def _results(path: Path | None) -> Results:
    return Results(path, "layertap bench")


def test_ratios_are_told_with_what_is_required_or_why_they_are_missing() -> None:
    row = ROWS["A"]
    results = _results(None)
    results.begin(row, {"machine": {}}, {"vllm-no-extraction": "no vllm here"})
    results.record(row, "layertap", _rate(104.0, mfu=0.75))
    results.record(row, "vllm-connector", _rate(100.0))
    results.record(row, "transformers", _rate(52.0))
    found = results.document["rows"]["A"]["ratios"]
    assert [(r["against"], r["ratio"], r["reached"]) for r in found] == [
        ("vllm-no-extraction", None, None),
        ("vllm-connector", 1.04, True),
        ("transformers", 2.0, None),
    ]
    lines = table.lines(results.document)
    assert [line[0] for line in lines] == ["A", "", ""]
    assert "missing: no vllm here" in lines[0]
    assert lines[1][2:6] == ("layertap", "104", "103 to 105", "0.75")
    assert lines[1][-3:] == ("1.04 x", "at least 1.04 x", "yes")
    assert table.markdown(results.document).count("\n") == 4


def test_of_starts_the_worse_ratio_counts() -> None:
    row = ROWS["H"]
    results = _results(None)
    results.begin(row, {}, {})
    results.record(row, "layertap", {"starts": [{"seconds": 10.0}, {"seconds": 9.0}]})
    results.record(row, "vllm-connector", {"starts": [{"seconds": 60.0}, {"seconds": 30.0}]})
    (ratio,) = results.document["rows"]["H"]["ratios"]
    assert (ratio["ratio"], ratio["reached"]) == (0.3, False)
    assert "10.0 s, 9.0 s" in table.lines(results.document)[0]


def test_a_file_keeps_the_fuller_measurement_of_a_row_until_the_new_one_is_as_full(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    row = ROWS["I"]
    old = _results(path)
    old.begin(row, {}, {})
    old.record(row, "layertap-server", _rate(95.0))
    assert json.loads(path.read_text())["rows"]["I"]["ways"].keys() == {"layertap-server"}
    old.record(row, "layertap", _rate(100.0))

    new = _results(path)
    new.begin(row, {}, {})
    new.record(row, "layertap-server", _rate(99.0))
    written = json.loads(path.read_text())
    assert written["rows"]["I"]["ratios"][0]["ratio"] == 0.95
    assert written["partial"]["I"]["ways"].keys() == {"layertap-server"}
    assert [line[0] for line in table.lines(written)] == ["I", "I (unfinished)"]
    new.record(row, "layertap", {"error": "it broke"})
    assert json.loads(path.read_text())["rows"]["I"]["ratios"][0]["ratio"] == 0.95
    new.record(row, "layertap", _rate(100.0))
    written = json.loads(path.read_text())
    assert written["rows"]["I"]["ratios"][0]["ratio"] == 0.99
    assert written["partial"] == {}


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    for content in ("{}", "[]", "no json", '{"suite": "cpu"}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(InvalidInputError, match="--output"):
            _results(tmp_path / "x.json")


def test_a_row_that_is_scaled_down_has_the_same_ways() -> None:
    for row in ROWS.values():
        small = scaled_down(row)
        assert small.ways == row.ways
        assert small.prompts.num_tokens <= 4 * 64
        assert max(small.layer_ids) <= 4
        assert dataclasses.replace(small, prompts=row.prompts) != row
