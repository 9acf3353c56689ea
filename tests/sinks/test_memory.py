import pytest
import torch

from layertap.errors import HandleNotFoundError
from layertap.sinks.base import RecordSpec
from layertap.sinks.memory import MemorySink, find_sink


def put(sink, request_id="r", rows=3):
    writer = sink.open(RecordSpec(request_id, torch.arange(rows), (rows, 1, 8), torch.bfloat16))
    writer.write(torch.ones(rows - 1, 1, 8, dtype=torch.bfloat16))
    writer.write(torch.full((1, 1, 8), 2, dtype=torch.bfloat16))
    return writer.commit()


def test_take_hands_out_once_and_bytes_follow():
    sink = MemorySink()
    handle = put(sink)
    assert handle == "memory://r"
    assert sink.bytes == 3 * 8 + 3 * 8 * 2
    record = sink.take(handle)
    assert record.hidden_states[:, 0, 0].tolist() == [1, 1, 2]
    assert record.request_id == "r"
    assert sink.bytes == 0
    with pytest.raises(HandleNotFoundError, match="memory://r"):
        sink.take(handle)


def test_a_second_record_of_the_same_id_replaces_the_first():
    sink = MemorySink()
    put(sink, rows=9)
    handle = put(sink, rows=3)
    assert sink.bytes == 3 * 8 + 3 * 8 * 2
    assert len(sink.get(handle)) == 3
    assert sink.delete(handle)
    assert not sink.delete(handle)


def test_what_is_read_is_not_the_callers_buffer():
    sink = MemorySink()
    buffer = torch.ones(1, 1, 8)
    writer = sink.open(RecordSpec("r", torch.arange(1), (1, 1, 8), torch.float32))
    writer.write(buffer)
    buffer.zero_()
    assert sink.take(writer.commit()).hidden_states.sum() == 8


def test_an_aborted_record_is_never_seen():
    sink = MemorySink()
    writer = sink.open(RecordSpec("aborted", torch.arange(1), (1, 1, 8), torch.float32))
    writer.write(torch.ones(1, 1, 8))
    writer.abort()
    assert find_sink("memory://aborted") is None
    assert sink.bytes == 0


def test_live_sinks_are_found_by_handle():
    sink = MemorySink()
    handle = put(sink, "only-here")
    assert find_sink(handle) is sink
    sink.close()
    assert find_sink(handle) is None


def test_rows_that_are_given_away_are_kept_without_a_copy():
    sink = MemorySink()
    rows = torch.ones(2, 1, 8)
    writer = sink.open(RecordSpec("r", torch.arange(2), (2, 1, 8), torch.float32))
    writer.keep(rows)
    assert sink.take(writer.commit()).hidden_states.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("threads", [1, 3])
def test_large_records_are_copied_whole(threads):
    sink = MemorySink(threads)
    rows = torch.randn(701, 10, 1000)  # 28 MB, and no whole number of large pages
    writer = sink.open(RecordSpec("r", torch.arange(1002), (1002, 10, 1000), torch.float32))
    buffer = rows.clone()
    writer.write(buffer)
    buffer.zero_()
    writer.write(rows[:301])
    states = sink.take(writer.commit()).hidden_states
    assert torch.equal(states[:701], rows)
    assert torch.equal(states[701:], rows[:301])
