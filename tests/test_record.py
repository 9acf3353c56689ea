import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from layertap.errors import CorruptRecordError
from layertap.layout import RecordLayout
from layertap.record import build_metadata, format_positions, parse_positions, read_record, verify_record
from layertap.sinks.base import RecordSpec
from layertap.sinks.file import FileSink


def write(folder, name="r1", rows=5, dtype=torch.bfloat16, positions=None, scales=False):
    hidden = torch.randn(rows, 2, 8).to(dtype)
    positions = range(rows) if positions is None else positions
    metadata = build_metadata(
        request_id=name, model="tiny \"é\"", layer_ids=(3, "norm"), num_hidden_layers=6, storage_dtype=dtype,
        num_prompt_tokens=rows, num_tokens=rows, positions=positions,
    )  # fmt: skip
    tokens = torch.arange(rows) + 100
    sink = FileSink(folder)
    writer = sink.open(RecordSpec(name, tokens, (rows, 2, 8), dtype, scales, metadata))
    factors = torch.rand(rows, 1, 1) if scales else None
    for i in range(0, rows, 2):
        writer.write(hidden[i : i + 2], factors[i : i + 2] if scales else None)
    path = writer.commit()
    sink.close()
    return path, tokens, hidden, factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read_back_bit_for_bit_by_us_and_by_safetensors(tmp_path, dtype):
    path, tokens, hidden, _ = write(tmp_path, dtype=dtype)
    loaded = load_file(path)
    assert set(loaded) == {"token_ids", "hidden_states"}
    assert torch.equal(loaded["hidden_states"], hidden)
    assert loaded["hidden_states"].dtype == dtype
    record = read_record(path)
    assert torch.equal(record.token_ids, tokens)
    assert torch.equal(record.hidden_states, hidden)
    assert (record.request_id, record.layer_ids, record.positions) == ("r1", (3, "norm"), None)
    assert torch.equal(record.column("norm"), hidden[:, 1])
    assert record.float().dtype == torch.float32
    assert len(record) == 5


def test_the_header_says_what_the_file_is(tmp_path):
    path, *_ = write(tmp_path)
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    metadata = header["__metadata__"]
    assert metadata["model"] == 'tiny "é"'
    assert metadata["layer_ids"] == "3,norm"
    assert metadata["storage_dtype"] == "bfloat16"
    assert metadata["num_hidden_layers"] == "6"
    assert metadata["format_version"] == "1"
    assert "positions" not in metadata
    assert all(len(metadata[f"xxh3_{name}"]) == 16 for name in ("token_ids", "hidden_states"))
    assert header["token_ids"]["data_offsets"] == [0, 40]
    with safe_open(path, framework="np") as file:
        assert file.metadata() == metadata


def test_float8_carries_its_scales(tmp_path):
    path, _, hidden, scales = write(tmp_path, dtype=torch.float8_e4m3fn, scales=True)
    assert torch.equal(load_file(path)["hidden_states_scales"], scales)
    record = read_record(path)
    assert torch.equal(record.dequantized, hidden.float() * scales)
    assert torch.equal(record.column(3), (hidden.float() * scales)[:, 0])
    assert verify_record(path).checksummed


def test_every_way_of_cutting_a_file_off_is_noticed(tmp_path):
    path, *_ = write(tmp_path)
    raw = Path(path).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in [*range(0, len(raw), 7), len(raw) - 1]:
        cut.write_bytes(raw[:size])
        for check in (read_record, verify_record):
            with pytest.raises(CorruptRecordError, match=r"cut\.safetensors"):
                check(cut)
    cut.write_bytes(raw + b"\0")
    with pytest.raises(CorruptRecordError, match="1 bytes too many"):
        read_record(cut)


def test_a_flipped_bit_anywhere_in_the_data_is_noticed(tmp_path):
    path, *_ = write(tmp_path)
    raw = bytearray(Path(path).read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    damaged = tmp_path / "damaged.safetensors"
    for i in range(start, len(raw), 11):
        raw[i] ^= 4
        damaged.write_bytes(raw)
        for check in (read_record, verify_record):
            with pytest.raises(CorruptRecordError, match="damaged"):
                check(damaged)
        read_record(damaged, verify=False)
        raw[i] ^= 4


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"token_ids": torch.arange(3)}, "holds no hidden_states"),
        ({"weight": torch.zeros(2)}, "not a record"),
        ({"token_ids": torch.arange(3), "hidden_states": torch.zeros(2, 1, 4)}, "2 rows"),
        ({"token_ids": torch.zeros(3), "hidden_states": torch.zeros(3, 1, 4)}, "int64"),
        ({"token_ids": torch.arange(3), "hidden_states": torch.zeros(3, 4)}, "floating"),
    ],
)
def test_files_that_are_something_else_are_refused(tmp_path, tensors, problem):
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CorruptRecordError, match=problem):
        read_record(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04 something else entirely", b"\x10" + b"\0" * 7 + b"not json at all!"]
)
def test_other_formats_are_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CorruptRecordError, match="not a safetensors file"):
        read_record(tmp_path / "x")


def test_a_file_of_vllm_without_metadata_is_read_and_said_to_have_no_checksums(tmp_path):
    hidden = torch.randn(3, 2, 4)
    save_file({"hidden_states": hidden, "token_ids": torch.arange(3)}, tmp_path / "v.safetensors")
    record = read_record(tmp_path / "v.safetensors")
    assert torch.equal(record.hidden_states, hidden)
    assert record.layer_ids == ()
    with pytest.raises(KeyError, match="does not say"):
        record.column(0)
    check = verify_record(tmp_path / "v.safetensors")
    assert not check.checksummed
    assert check.shape == (3, 2, 4)


def test_contradicting_metadata_is_refused(tmp_path):
    save_file(
        {"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(3)},
        tmp_path / "x",
        {"layer_ids": "1"},
    )
    with pytest.raises(CorruptRecordError, match="contradicts"):
        read_record(tmp_path / "x")


def test_kept_positions_come_back(tmp_path):
    path, *_ = write(tmp_path, rows=4, positions=(9, 3, 4, 5))
    assert read_record(path).positions == (9, 3, 4, 5)
    assert read_record(path).metadata["positions"] == "9,3:6"


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_positions_survive_their_text(positions):
    assert parse_positions(format_positions(positions)) == tuple(positions)


@given(st.integers(1, 2**64 - 1), st.integers(1, 50), st.text(max_size=20))
def test_the_header_has_the_same_length_whatever_the_checksums(value, rows, text):
    layout = RecordLayout((rows, 2, 3), torch.float32, True, {"model": text})
    names = ("token_ids", "hidden_states_scales", "hidden_states")
    assert len(layout.header(dict.fromkeys(names, value))) == layout.header_bytes
    assert layout.header_bytes % 8 == 0
